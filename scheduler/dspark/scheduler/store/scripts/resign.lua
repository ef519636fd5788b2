-- Give the planning lease back.
--
-- keys
--   planner         hash  holder, term, expires (ms): who plans
-- arguments
--   1 now, ms; empty: the server's clock
--   2 term; another than the current one changes nothing
-- result
--   1 if it was given back, else 0

if redis.call("HGET", K.planner, "term") ~= ARGV[2] then
  return 0
end
return redis.call("DEL", K.planner)
