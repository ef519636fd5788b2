-- Verifiers' newest reports.
--
-- keys
--   members         zset  replica -> ms at which it counts as dead
--   epochs          hash  replica -> its epoch
--   reports         hash  verifier -> <ms at which it is too old> <epoch> <sequence> <report>
-- arguments
--   1 now, ms; empty: the server's clock
--   2 ttl, ms
--   3... four for each report: verifier, epoch, sequence, report
-- result
--   one for each: taken; old: a newer one of its epoch is here; unknown: not a member; fenced: a
--       newer epoch exists

local ttl, results = tonumber(ARGV[2]), {}
for i = 3, #ARGV, 4 do
  local verifier, epoch, sequence = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local current = tonumber(redis.call("HGET", K.epochs, verifier) or 0)
  local result = "taken"
  if not alive(verifier) or current < epoch then
    result = "unknown"
  elseif current > epoch then
    result = "fenced"
  else
    local _, _, _, of, last =
      string.find(redis.call("HGET", K.reports, verifier) or "", "^(%d+) (%d+) (%d+) ")
    if of and tonumber(of) == epoch and tonumber(last) > sequence then
      result = "old"
    else
      redis.call("HSET", K.reports, verifier,
                 text(now + ttl) .. " " .. ARGV[i + 1] .. " " .. ARGV[i + 2] .. " " .. ARGV[i + 3])
    end
  end
  results[#results + 1] = result
end
keep(K.reports)
return results
