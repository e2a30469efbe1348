"""Lua that the cache's server runs whole, for a cache that counts its own bytes.

KEYS: sorted set of members by last use, sum of bytes, number pushed out. A member is a key and the size of its value
(u32, little-endian), so that the size is known when an entry is pushed out that had expired by itself.
"""

from __future__ import annotations

#: What an entry takes besides its value: names, the member, the tables.
OVERHEAD = 320

#: Bytes of a value; what somebody put there that is none goes.
_SIZE = """
local function size_of(name)
  local size = redis.pcall('STRLEN', name)
  if type(size) == 'table' then
    redis.call('DEL', name)
    return 0
  end
  return size
end
"""

_EVICT = f"""
local function evict(used, limit, prefix)
  local gone = 0
  while used > limit do
    local old = redis.call('ZPOPMIN', KEYS[1], 16)
    if #old == 0 then
      used = 0
      break
    end
    for i = 1, #old, 2 do
      redis.call('DEL', prefix .. string.sub(old[i], 1, -5))
      used = used - struct.unpack('<I4', string.sub(old[i], -4)) - {OVERHEAD}
      gone = gone + 1
    end
  end
  return used, gone
end
"""

#: ARGV: capacity, now, ttl in seconds (0: none), prefix, then keys and values in turn.
PUT = (
    _SIZE
    + _EVICT
    + f"""
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
local capacity, now, ttl, prefix = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local evicted, gone = 0, 0
for i = 5, #ARGV, 2 do
  local name, size = prefix .. ARGV[i], #ARGV[i + 1]
  local before = size_of(name)
  if before > 0 and redis.call('ZREM', KEYS[1], ARGV[i] .. struct.pack('<I4', before)) == 1 then
    used = used - before - {OVERHEAD}
  end
  if size + {OVERHEAD} <= capacity then
    used, gone = evict(used, capacity - size - {OVERHEAD}, prefix)
    evicted = evicted + gone
    if ttl == '0' then
      redis.call('SET', name, ARGV[i + 1])
    else
      redis.call('SET', name, ARGV[i + 1], 'EX', ttl)
    end
    if redis.call('ZADD', KEYS[1], now, ARGV[i] .. struct.pack('<I4', size)) == 1 then
      used = used + size + {OVERHEAD}
    end
  end
end
if ttl ~= '0' then
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ttl, 'LIMIT', 0, 64)) do
    redis.call('ZREM', KEYS[1], old)
    redis.call('DEL', prefix .. string.sub(old, 1, -5))
    used = used - struct.unpack('<I4', string.sub(old, -4)) - {OVERHEAD}
  end
end
redis.call('SET', KEYS[2], used)
if evicted > 0 then redis.call('INCRBY', KEYS[3], evicted) end
return used
"""
)

#: ARGV: bytes to come down to, prefix. Removes before it writes, which a server that is full allows.
EVICT = (
    _EVICT
    + """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
local evicted
used, evicted = evict(used, tonumber(ARGV[1]), ARGV[2])
if evicted > 0 then
  redis.call('SET', KEYS[2], used)
  redis.call('INCRBY', KEYS[3], evicted)
end
return evicted
"""
)

#: ARGV: prefix, then keys. Returns how many there were.
DROP = f"""{_SIZE}
local dropped, freed = 0, 0
for i = 2, #ARGV do
  local name = ARGV[1] .. ARGV[i]
  local size = size_of(name)
  if size > 0 then
    dropped = dropped + 1
    redis.call('DEL', name)
    if redis.call('ZREM', KEYS[1], ARGV[i] .. struct.pack('<I4', size)) == 1 then
      freed = freed + size + {OVERHEAD}
    end
  end
end
if freed > 0 then redis.call('DECRBY', KEYS[2], freed) end
return dropped
"""

#: KEYS: the epoch's. ARGV: prefix, then keys. Returns the epoch, their values, and the milliseconds that each has left.
GET = """
local names, left = {}, {}
for i = 2, #ARGV do
  names[i - 1] = ARGV[1] .. ARGV[i]
  left[i - 1] = redis.call('PTTL', names[i - 1])
end
return {redis.call('GET', KEYS[1]), redis.call('MGET', unpack(names)), left}
"""

#: ARGV: now, prefix, then keys.
TOUCH = f"""{_SIZE}
for i = 3, #ARGV do
  local size = size_of(ARGV[2] .. ARGV[i])
  if size > 0 then redis.call('ZADD', KEYS[1], 'XX', ARGV[1], ARGV[i] .. struct.pack('<I4', size)) end
end
"""
