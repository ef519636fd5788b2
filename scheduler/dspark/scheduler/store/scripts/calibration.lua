-- The calibration.
--
-- keys
--   calibration     hash  version, data
-- arguments
--   1 now, ms; empty: the server's clock
--   2 version that the caller has
-- result
--   nothing: there is no newer one
--   else version, data

local found = redis.call("HMGET", K.calibration, "version", "data")
if not found[1] or tonumber(found[1]) <= tonumber(ARGV[2]) then
  return false
end
return found
