-- Everybody alive.
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
--   2 number of the list that the caller has
-- result
--   nothing: that is the list
--   else the number of the list, then four for each member: replica, epoch, 1 if it drains or is
--       wanted to, card

sweep()
local version = redis.call("HGET", K.counters, "members") or "0"
if version == ARGV[2] then
  return false
end
local list = {version}
for _, replica in ipairs(redis.call("ZRANGEBYSCORE", K.members, "(" .. text(now), "+inf")) do
  local drains = redis.call("HEXISTS", K.draining, replica) == 1
    or redis.call("HEXISTS", K.wanted, replica) == 1
  list[#list + 1] = replica
  list[#list + 1] = redis.call("HGET", K.epochs, replica)
  list[#list + 1] = drains and "1" or "0"
  list[#list + 1] = redis.call("HGET", K.cards, replica)
end
return list
