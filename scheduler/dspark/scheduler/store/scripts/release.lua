-- Give leases back. Unknown and expired ones are fine.
--
-- keys
--   leases          hash  lease -> JSON
--   lease_expiry    zset  lease -> ms at which it expires
--   leases_of       zset  <verifier>LF<lease>, score 0: a verifier's leases by prefix
--   claimed_tokens  hash  verifier -> tokens of its leases
--   claimed_runs    hash  verifier or drafter -> runs of its leases
--   tenant_tokens   hash  tenant -> tokens of its leases
--   tenant_runs     hash  tenant -> runs of its leases
-- arguments
--   1 now, ms; empty: the server's clock
--   2... leases
-- result
--   how many there were

local freed = 0
for i = 2, #ARGV do
  if free(ARGV[i]) then
    freed = freed + 1
  end
end
return freed
