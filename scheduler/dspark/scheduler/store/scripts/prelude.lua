-- What every script begins with. In front of it stand, written by redis_store.py:
--   local K           the script's keys by the names of names.py
--   local MAX_TTL, KEEP, SWEEP   of names.py
--
-- argument 1 of every script: now, ms; empty: the server's clock. One clock for all callers; if it
-- jumps forward entries expire and their owners make them again, if it jumps back nobody stays for
-- longer than MAX_TTL.
--
-- Numbers become text by text() alone: Lua's own way loses digits beyond the fourteenth.

local function text(number)
  return string.format("%.0f", number)
end

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call("TIME")
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Keys that something was written to live on for KEEP.
local function keep(...)
  for _, key in ipairs({...}) do
    redis.call("PEXPIRE", key, KEEP)
  end
end

-- A number above all that were given before, also by a store that was lost since: at least now.
-- Needs counters.
local function ticket()
  local last = tonumber(redis.call("HGET", K.counters, "ticket") or 0)
  local number = math.max(last + 1, now)
  redis.call("HSET", K.counters, "ticket", text(number))
  return number
end

-- The list of members is another one. Needs counters.
local function members_changed()
  redis.call("HSET", K.counters, "members", text(ticket()))
end

-- Needs members.
local function alive(replica)
  local expires = redis.call("ZSCORE", K.members, replica)
  return expires and tonumber(expires) > now
end

local function add(key, field, amount)
  if redis.call("HINCRBY", key, field, amount) <= 0 then
    redis.call("HDEL", key, field)
  end
end

-- Count a lease (sign 1) or count it no more (-1). Needs claimed_*, tenant_*.
local function count(lease, sign)
  add(K.claimed_tokens, lease.verifier[1], sign * lease.tokens)
  add(K.claimed_runs, lease.verifier[1], sign * lease.choices)
  if lease.drafter then
    add(K.claimed_runs, lease.drafter[1], sign * lease.choices)
  end
  add(K.tenant_tokens, lease.tenant, sign * lease.tokens)
  add(K.tenant_runs, lease.tenant, sign * lease.choices)
end

-- Needs lease*, claimed_*, tenant_*.
local function keep_leases()
  keep(K.leases, K.lease_expiry, K.leases_of, K.claimed_tokens, K.claimed_runs, K.tenant_tokens,
       K.tenant_runs)
end

-- Then keep_leases(). Needs lease*, claimed_*, tenant_*.
local function grant(id, record, ttl)
  local lease = cjson.decode(record)
  redis.call("HSET", K.leases, id, record)
  redis.call("ZADD", K.lease_expiry, now + ttl, id)
  redis.call("ZADD", K.leases_of, 0, lease.verifier[1] .. "\n" .. id)
  count(lease, 1)
end

-- Whether there was such a lease. Needs lease*, claimed_*, tenant_*.
local function free(id)
  local record = redis.call("HGET", K.leases, id)
  if not record then
    return false
  end
  local lease = cjson.decode(record)
  redis.call("HDEL", K.leases, id)
  redis.call("ZREM", K.lease_expiry, id)
  redis.call("ZREM", K.leases_of, lease.verifier[1] .. "\n" .. id)
  count(lease, -1)
  return true
end

-- Free at most `most` leases of a verifier; how many they were. Needs lease*, claimed_*, tenant_*.
local function free_of(verifier, most)
  local held = redis.call("ZRANGEBYLEX", K.leases_of, "[" .. verifier .. "\n",
                          "(" .. verifier .. "\011", "LIMIT", 0, most)
  for _, entry in ipairs(held) do
    free(string.sub(entry, #verifier + 2))
  end
  return #held
end

-- Needs every key of members.
local function forget(replica)
  redis.call("ZREM", K.members, replica)
  local known = {K.epochs, K.cards, K.step_costs, K.draining, K.wanted, K.loads, K.reports}
  for _, key in ipairs(known) do
    redis.call("HDEL", key, replica)
  end
  members_changed()
end

-- Clear away what has expired: members with their leases, then leases; SWEEP of them at most, the
-- oldest first. Needs every key but those of the planner and the calibration.
local function sweep()
  for _, key in ipairs({K.members, K.lease_expiry}) do
    local ahead = redis.call("ZRANGEBYSCORE", key, "(" .. text(now + MAX_TTL), "+inf",
                             "LIMIT", 0, SWEEP)
    for _, id in ipairs(ahead) do
      redis.call("ZADD", key, now + MAX_TTL, id)
    end
  end
  local left = SWEEP
  local dead = redis.call("ZRANGEBYSCORE", K.members, "-inf", text(now), "LIMIT", 0, left)
  for _, id in ipairs(dead) do
    left = left - free_of(id, left)
    if left <= 0 then
      return
    end
    forget(id)
    left = left - 1
  end
  local over = redis.call("ZRANGEBYSCORE", K.lease_expiry, "-inf", text(now), "LIMIT", 0, left)
  for _, id in ipairs(over) do
    free(id)
  end
end
