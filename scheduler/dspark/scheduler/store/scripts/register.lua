-- A replica begins a new life. Leases on an earlier one are freed; a wish that it drain stays if
-- it was still alive.
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
--   3 JSON: pool, address, card, calibration
--   4 JSON of its step cost; empty: none
--   5 ttl, ms
-- result
--   its epoch, above every earlier one

sweep()
local replica, card, cost, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local wanted = alive(replica) and redis.call("HGET", K.wanted, replica)
if redis.call("ZSCORE", K.members, replica) then
  while free_of(replica, SWEEP) > 0 do end
  forget(replica)
end
local epoch = ticket()
redis.call("ZADD", K.members, now + ttl, replica)
redis.call("HSET", K.epochs, replica, text(epoch))
redis.call("HSET", K.cards, replica, card)
if cost ~= "" then
  redis.call("HSET", K.step_costs, replica, cost)
end
if wanted then
  redis.call("HSET", K.wanted, replica, wanted)
end
members_changed()
keep(K.members, K.epochs, K.cards, K.step_costs, K.wanted)
return text(epoch)
