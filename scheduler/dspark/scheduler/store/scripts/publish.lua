-- New plans for all; a verifier that is left out has none. Only the current term may, even when
-- its lease ran out, as long as nobody else took it.
--
-- keys
--   counters        hash  ticket: last number given to an epoch, term, plan or list of members;
--                         members: number of the list of members
--   planner         hash  holder, term, expires (ms): who plans
--   published       hash  version, expires (ms): of the plans
--   plans           hash  verifier -> its plan
-- arguments
--   1 now, ms; empty: the server's clock
--   2 term
--   3 ttl, ms
--   4... two for each plan: verifier, plan
-- result
--   version of the plans, above every earlier one, or nothing: the term is over

if redis.call("HGET", K.planner, "term") ~= ARGV[2] then
  return false
end
local ttl = tonumber(ARGV[3])
local version = text(ticket())
redis.call("HSET", K.published, "version", version, "expires", text(now + ttl))
redis.call("DEL", K.plans)
for i = 4, #ARGV, 2 do
  redis.call("HSET", K.plans, ARGV[i], ARGV[i + 1])
end
keep(K.published, K.plans)
return version
