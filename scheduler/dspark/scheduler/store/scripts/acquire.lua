-- Lease a verifier: the lease that exists already, renewed, else the first candidate that is alive
-- in the epoch named, does not drain and has room.
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
--   2 lease
--   3 owner
--   4 its epoch
--   5 tenant
--   6 tokens
--   7 runs
--   8 tokens that the tenant's leases may claim; empty: any
--   9 ttl, ms
--   10... five for each candidate: verifier, epoch, tokens and runs that its leases may claim,
--       JSON of the lease it would be
-- result
--   lease, its JSON
--   full: no candidate fits
--   tenant: its limit would be passed
--   fenced, the owner's newer epoch

sweep()
local id, owner, owner_epoch, tenant = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local tokens, runs = tonumber(ARGV[6]), tonumber(ARGV[7])
local limit, ttl = tonumber(ARGV[8]), tonumber(ARGV[9])

local function claimed(key, field)
  return tonumber(redis.call("HGET", key, field) or 0)
end

local epoch = claimed(K.epochs, owner)
if epoch > owner_epoch then
  return {"fenced", text(epoch)}
end
local record = redis.call("HGET", K.leases, id)
if record then
  redis.call("ZADD", K.lease_expiry, now + ttl, id)
  keep_leases()
  return {"lease", record}
end
if limit and claimed(K.tenant_tokens, tenant) + tokens > limit then
  return {"tenant"}
end
for i = 10, #ARGV, 5 do
  local verifier = ARGV[i]
  if alive(verifier)
    and claimed(K.epochs, verifier) == tonumber(ARGV[i + 1])
    and redis.call("HEXISTS", K.draining, verifier) == 0
    and redis.call("HEXISTS", K.wanted, verifier) == 0
    and claimed(K.claimed_tokens, verifier) + tokens <= tonumber(ARGV[i + 2])
    and claimed(K.claimed_runs, verifier) + runs <= tonumber(ARGV[i + 3])
  then
    grant(id, ARGV[i + 4], ttl)
    keep_leases()
    return {"lease", ARGV[i + 4]}
  end
end
return {"full"}
