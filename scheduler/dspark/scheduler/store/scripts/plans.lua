-- Plans of verifiers.
--
-- keys
--   published       hash  version, expires (ms): of the plans
--   plans           hash  verifier -> its plan
-- arguments
--   1 now, ms; empty: the server's clock
--   2 version that the caller has
--   3... verifiers
-- result
--   nothing: there are no newer ones, or they ran out
--   else the version, then two for each that has one: verifier, plan

local published = redis.call("HMGET", K.published, "version", "expires")
local expires = tonumber(published[2] or 0)
if expires <= now or expires > now + MAX_TTL or tonumber(published[1]) <= tonumber(ARGV[2]) then
  return false
end
local list = {published[1]}
for i = 3, #ARGV do
  local plan = redis.call("HGET", K.plans, ARGV[i])
  if plan then
    list[#list + 1] = ARGV[i]
    list[#list + 1] = plan
  end
end
return list
