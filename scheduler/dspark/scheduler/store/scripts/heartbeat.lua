-- A replica is alive, and says how it is.
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
--   3 its epoch
--   4 1 if it drains, else 0
--   5 JSON of its load; empty: leave it as it was
--   6 ttl, ms
-- result
--   ok, 1 if it is wanted to drain, else 0
--   unknown: it is not a member, or under an older epoch than its own
--   fenced, the newer epoch

sweep()
local replica, epoch, draining, load, ttl =
  ARGV[2], tonumber(ARGV[3]), ARGV[4] == "1", ARGV[5], tonumber(ARGV[6])
local current = tonumber(redis.call("HGET", K.epochs, replica) or 0)
if not alive(replica) or current < epoch then
  return {"unknown"}
end
if current > epoch then
  return {"fenced", text(current)}
end
redis.call("ZADD", K.members, now + ttl, replica)
local said = redis.call("HEXISTS", K.draining, replica) == 1
if draining ~= said then
  if draining then
    redis.call("HSET", K.draining, replica, 1)
  else
    redis.call("HDEL", K.draining, replica)
  end
  members_changed()
end
if load ~= "" then
  redis.call("HSET", K.loads, replica, load)
end
-- Also what it only relies on: its sign of life keeps all that is known of it.
keep(K.members, K.epochs, K.cards, K.step_costs, K.draining, K.wanted, K.loads)
return {"ok", text(redis.call("HEXISTS", K.wanted, replica))}
