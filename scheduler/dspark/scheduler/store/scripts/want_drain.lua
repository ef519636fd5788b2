-- Wish that a replica drain, or take the wish back. It ends with the replica's life.
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
--   2 replica
--   3 1 to drain, 0 not to
-- result
--   1, or 0: it is not a member

sweep()
local replica, wish = ARGV[2], ARGV[3] == "1"
if not alive(replica) then
  return 0
end
if wish ~= (redis.call("HEXISTS", K.wanted, replica) == 1) then
  if wish then
    redis.call("HSET", K.wanted, replica, 1)
    keep(K.wanted)
  else
    redis.call("HDEL", K.wanted, replica)
  end
  members_changed()
end
return 1
