-- Owners still hold these leases. One that the store does not know is made again, room or not, if
-- its verifier is alive in whatever epoch: the store may have been lost, and the run is there.
--
-- keys
--   counters        hash  ticket: last number given to an epoch, term, plan or list of members;
--                         members: number of the list of members
--   members         zset  replica -> ms at which it counts as dead
--   epochs          hash  replica -> its epoch
--   cards           hash  replica -> JSON: pool, address, card, calibration
--   step_costs      hash  verifier -> JSON of its step cost
--   draining        hash  replica -> 1 if it says that it drains
--   wanted          hash  replica -> 1 if it is wanted to drain
--   loads           hash  drafter -> JSON of its load
--   leases          hash  lease -> JSON
--   lease_expiry    zset  lease -> ms at which it expires
--   leases_of       zset  <verifier>LF<lease>, score 0: a verifier's leases by prefix
--   claimed_tokens  hash  verifier -> tokens of its leases
--   claimed_runs    hash  verifier or drafter -> runs of its leases
--   tenant_tokens   hash  tenant -> tokens of its leases
--   tenant_runs     hash  tenant -> runs of its leases
--   reports         hash  verifier -> <ms at which it is too old> <epoch> <sequence> <report>
-- arguments
--   1 now, ms; empty: the server's clock
--   2 ttl, ms
--   3... two for each lease: lease, its JSON
-- result
--   leases kept, made again, dropped for want of a verifier

sweep()
local ttl, kept, remade, dropped = tonumber(ARGV[2]), 0, 0, 0
for i = 3, #ARGV, 2 do
  local id, record = ARGV[i], ARGV[i + 1]
  if redis.call("HEXISTS", K.leases, id) == 1 then
    redis.call("ZADD", K.lease_expiry, now + ttl, id)
    kept = kept + 1
  elseif alive(cjson.decode(record).verifier[1]) then
    grant(id, record, ttl)
    remade = remade + 1
  else
    dropped = dropped + 1
  end
end
keep_leases()
return {kept, remade, dropped}
