-- Replace the calibration. Only the current term may, and only by a higher version.
--
-- keys
--   planner         hash  holder, term, expires (ms): who plans
--   calibration     hash  version, data
-- arguments
--   1 now, ms; empty: the server's clock
--   2 term
--   3 version
--   4 data
-- result
--   1 if it was replaced, else 0

if redis.call("HGET", K.planner, "term") ~= ARGV[2]
  or tonumber(redis.call("HGET", K.calibration, "version") or -1) >= tonumber(ARGV[3]) then
  return 0
end
redis.call("HSET", K.calibration, "version", ARGV[3], "data", ARGV[4])
return 1
