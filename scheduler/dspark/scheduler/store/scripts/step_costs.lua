-- Step costs of verifiers that are alive and have one.
--
-- keys
--   members         zset  replica -> ms at which it counts as dead
--   epochs          hash  replica -> its epoch
--   step_costs      hash  verifier -> JSON of its step cost
-- arguments
--   1 now, ms; empty: the server's clock
--   2... verifiers
-- result
--   three for each: verifier, epoch, JSON

local list = {}
for i = 2, #ARGV do
  local cost = alive(ARGV[i]) and redis.call("HGET", K.step_costs, ARGV[i])
  if cost then
    list[#list + 1] = ARGV[i]
    list[#list + 1] = redis.call("HGET", K.epochs, ARGV[i])
    list[#list + 1] = cost
  end
end
return list
