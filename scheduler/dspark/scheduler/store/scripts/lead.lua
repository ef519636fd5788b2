-- Take or keep the planning lease. The term changes with the holder; who comes back before another
-- took it has the same.
--
-- keys
--   counters        hash  ticket: last number given to an epoch, term, plan or list of members;
--                         members: number of the list of members
--   planner         hash  holder, term, expires (ms): who plans
-- arguments
--   1 now, ms; empty: the server's clock
--   2 holder
--   3 ttl, ms
-- result
--   the term, or nothing: another leads

local holder, ttl = ARGV[2], tonumber(ARGV[3])
local leads = redis.call("HMGET", K.planner, "holder", "term", "expires")
local term = leads[2]
if leads[1] ~= holder then
  local expires = tonumber(leads[3] or 0)
  if expires > now and expires <= now + MAX_TTL then
    return false
  end
  term = text(ticket())
end
redis.call("HSET", K.planner, "holder", holder, "term", term, "expires", text(now + ttl))
keep(K.planner)
return term
