-- A channel is the hash KEYS[1], and beside it a stream for each partition. Redis runs this alone and to its end.
--
-- The id of an entry is OFFSET+1 and, behind the dash, the moment at which it was appended: microseconds, which never
-- go back within a partition. The hash tells what the channel has to be, and for each partition P what comes next
-- (next:P), the newest moment (time:P), the first offset that is kept (low:P) and when to look for what is too old
-- (due:P).
-- A compacted partition has three keys more: the id of the last record of each key; ids that were replaced, with the
-- moment; and deletions. Both lists are in order of time, so that what is due lies at their beginning.

local channel = KEYS[1]
local AT_ONCE = 64 -- However large they are, so many records can be looked at.

local function whole(number)
    return string.format('%.0f', number)
end

local function parts(id)
    local first, moment = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(first) - 1, tonumber(moment)
end

local function stream(partition)
    return channel .. ':' .. partition
end

local function ask(...)
    return redis.call('HMGET', channel, ...)
end

local function key_and_deletion(packed)
    local key, value = struct.unpack('>i4i4', packed)
    return key >= 0 and string.sub(packed, 13, 12 + key), value < 0
end

local function replace(partition, packed, id, now)
    local key, deletion = key_and_deletion(packed)
    if not key then
        return
    end
    local log = stream(partition)
    local old = redis.call('HGET', log .. ':keys', key)
    redis.call('HSET', log .. ':keys', key, id)
    if old then
        redis.call('RPUSH', log .. ':replaced', whole(now) .. ' ' .. old)
    end
    if deletion then
        redis.call('RPUSH', log .. ':deleted', whole(now) .. ' ' .. id .. ' ' .. key)
    end
end

-- What lies at the beginning of a list since before a moment, out of the list.
local function due(list, before, most)
    local first = redis.call('LINDEX', list, 0)
    if not first or tonumber(string.match(first, '^%d+')) > before then
        return {}
    end
    local found = {}
    for _, one in ipairs(redis.call('LRANGE', list, 0, most - 1)) do
        local moment, rest = string.match(one, '^(%d+) (.*)$')
        if tonumber(moment) > before then
            break
        end
        found[#found + 1] = rest
    end
    redis.call('LTRIM', list, #found, -1)
    return found
end

local function compact(partition, now, lag, deletions, most)
    local log = stream(partition)
    for _, id in ipairs(due(log .. ':replaced', now - lag, most)) do
        redis.call('XDEL', log, id)
    end
    for _, one in ipairs(due(log .. ':deleted', now - deletions, most)) do
        local id, key = string.match(one, '^(%S+) (.*)$')
        if redis.call('HGET', log .. ':keys', key) == id then
            redis.call('HDEL', log .. ':keys', key)
            redis.call('XDEL', log, id)
        end
    end
end

local function expire(partition, now, keep, compacted, most)
    local log, low, next_look, seen = stream(partition), nil, now, false
    while most > 0 and not seen do
        local entries = redis.call('XRANGE', log, low and whole(low + 1) or '-', '+', 'COUNT', AT_ONCE)
        for _, entry in ipairs(entries) do
            local offset, moment = parts(entry[1])
            if moment >= now - keep then
                next_look, seen = moment + keep, true
                break
            end
            low, most = offset + 1, most - 1
            if compacted then
                local key = key_and_deletion(entry[2][2])
                if key and redis.call('HGET', log .. ':keys', key) == entry[1] then
                    redis.call('HDEL', log .. ':keys', key)
                end
            end
        end
        seen = seen or #entries == 0
    end
    if low then
        redis.call('XTRIM', log, 'MINID', whole(low + 1))
        redis.call('HSET', channel, 'low:' .. partition, whole(low))
    end
    redis.call('HSET', channel, 'due:' .. partition, whole(next_look))
end

local commands = {}

-- partition, the number of partitions by which it was chosen, records … → 1; or 0 and their true number, and
-- nothing was appended. Each call clears up somewhat more than it brings: what is due goes little by little. It does so
-- first: when its memory is full, Redis lets those write who have deleted something, and nobody else.
function commands.append(partition, partitions)
    local told = ask(
        'partitions', 'keep', 'lag', 'deletions', 'next:' .. partition, 'time:' .. partition, 'due:' .. partition
    )
    if not told[1] then
        return false
    end
    if told[1] ~= partitions then
        return {0, tonumber(told[1])}
    end
    local keep, lag, deletions = tonumber(told[2]), tonumber(told[3]), tonumber(told[4])
    local clock = redis.call('TIME')
    local now = math.max(clock[1] * 1000000 + clock[2], tonumber(told[6] or '0'))
    local most = 2 * (#ARGV - 3) + 10
    if lag then
        compact(partition, now, lag, deletions, most)
    end
    if keep and now > tonumber(told[7] or '0') then
        expire(partition, now, keep, lag, most)
    end
    local number, log = tonumber(told[5] or '0'), stream(partition)
    for at = 4, #ARGV do
        number = number + 1
        local id = whole(number) .. '-' .. whole(now)
        redis.call('XADD', log, id, 'r', ARGV[at])
        if lag then
            replace(partition, ARGV[at], id, now)
        end
    end
    redis.call('HSET', channel, 'next:' .. partition, whole(number), 'time:' .. partition, whole(now))
    return {1}
end

-- partition, position (-1: the beginning), most entries, most bytes → the channel's id, the first offset that is kept,
-- the next offset, where reading goes on, the ids, the records one behind the other.
function commands.fetch(partition, position, most, bytes)
    local told = ask('id', 'low:' .. partition, 'next:' .. partition)
    if not told[1] then
        return false
    end
    local low, next_one = tonumber(told[2] or '0'), tonumber(told[3] or '0')
    position, most, bytes = tonumber(position), tonumber(most), tonumber(bytes)
    if position < 0 then
        position = low
    end
    local ids, records, step, taken = {}, {}, 8, 0
    while position >= low and position < next_one and most > 0 and bytes > 0 do
        local entries = redis.call('XRANGE', stream(partition), whole(position + 1), '+', 'COUNT', step)
        local held = 0
        for _, entry in ipairs(entries) do
            if most > 0 and bytes > 0 then
                local packed = entry[2][2]
                ids[#ids + 1], records[#records + 1] = entry[1], packed
                position = parts(entry[1]) + 1
                most, bytes, taken, held = most - 1, bytes - #packed, taken + #packed, held + 1
            end
        end
        if #entries < step and held == #entries then
            position = next_one
        end
        -- As many at once as should fill what is left.
        step = math.max(1, math.min(AT_ONCE, most, math.floor(bytes * #ids / math.max(1, taken))))
    end
    return {told[1], low, next_one, position, table.concat(ids, ' '), table.concat(records)}
end

-- moment → for each partition the first offset whose entry was appended then or later.
function commands.since(moment)
    local told = ask('partitions')
    if not told[1] then
        return false
    end
    moment = tonumber(moment)
    local answer = {}
    for partition = 0, told[1] - 1 do
        local known = ask('low:' .. partition, 'next:' .. partition)
        local first, last = tonumber(known[1] or '0'), tonumber(known[2] or '0')
        local found = last
        while first < last do
            local middle = math.floor((first + last) / 2)
            local entry = redis.call('XRANGE', stream(partition), whole(middle + 1), '+', 'COUNT', 1)[1]
            local offset, appended = nil, moment
            if entry then
                offset, appended = parts(entry[1])
            end
            if appended >= moment then
                last, found = middle, offset or found
            else
                first = offset + 1
            end
        end
        answer[#answer + 1] = found
    end
    return answer
end

-- partitions, then fields and values of the hash → what was done.
function commands.ensure(partitions)
    local held = ask('partitions')[1]
    if not held then
        redis.call('HSET', channel, 'partitions', partitions, unpack(ARGV, 3))
        redis.call('SADD', KEYS[2], string.match(channel, '{(.*)}$'))
        return 'made'
    end
    if tonumber(held) < tonumber(partitions) then
        redis.call('HSET', channel, 'partitions', partitions)
        return 'extended'
    end
    return 'there'
end

function commands.remove()
    local held = ask('partitions')[1]
    if not held then
        return false
    end
    for partition = 0, held - 1 do
        local log = stream(partition)
        redis.call('UNLINK', log, log .. ':keys', log .. ':replaced', log .. ':deleted')
    end
    redis.call('UNLINK', channel)
    redis.call('SREM', KEYS[2], string.match(channel, '{(.*)}$'))
    return 1
end

-- name, the document as it was read, the document as it is to be → whether nobody else was quicker.
function commands.swap(name, old, new)
    if (redis.call('HGET', KEYS[1], name) or '') ~= old then
        return 0
    end
    if new == '' then
        redis.call('HDEL', KEYS[1], name)
    else
        redis.call('HSET', KEYS[1], name, new)
    end
    return 1
end

return commands[ARGV[1]](ARGV[2], ARGV[3], ARGV[4], ARGV[5])
