#include "replay.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace kvstore {
namespace {

constexpr std::uint64_t CHUNK_BYTES = SLOT_ALIGNMENT;
constexpr std::uint64_t DAEMON = 0, ENGINE = 1;  // groups
constexpr std::uint64_t GRANTS_MAX = 64;         // what an engine holds at once, and at most a quarter of the tier
constexpr std::uint64_t GRANTS_SHARE = 4;
constexpr Id NAMESPACE{}, TENANT{};

}  // namespace

Replay::Replay(Index& cpu, std::uint64_t cpu_chunks, Index* fs)
    : cpu_(cpu), fs_(fs), grants_max_(std::clamp<std::uint64_t>(cpu_chunks / GRANTS_SHARE, 1, GRANTS_MAX)) {}

void Replay::look_up(std::span<const std::uint64_t> chain) {
    key_bytes_.assign(chain.size(), Key{});
    keys_.clear();
    for (std::size_t i = 0; i < chain.size(); ++i) {
        std::memcpy(key_bytes_[i].data(), &chain[i], sizeof chain[i]);
        keys_.emplace_back(key_bytes_[i]);
    }
    in_cpu_ = cpu_.lookup(NAMESPACE, TENANT, keys_);
    if (fs_ != nullptr) in_fs_ = fs_->lookup(NAMESPACE, TENANT, keys_);
}

std::vector<Where> Replay::find(std::span<const std::uint64_t> chain) {
    look_up(chain);
    std::vector<Where> found = in_cpu_;
    for (std::size_t i = 0; fs_ != nullptr && i < found.size(); ++i) {
        if (found[i] != Where::CPU && in_fs_[i] == Where::CPU) found[i] = Where::FS;
    }
    return found;
}

Served Replay::serve(std::span<const std::uint64_t> chain, const Ends& ends) {
    look_up(chain);
    const auto at_most = [&](std::uint32_t end) { return std::min<std::size_t>(end, chain.size()); };
    Served served;
    for (; served.hits < at_most(ends.load); ++served.hits) {
        if (has(served.hits)) continue;
        if (fs_ == nullptr || in_fs_[served.hits] != Where::CPU || !promote(served.hits)) break;
        ++served.fs_hits;
    }
    touch();
    served.stored = store(static_cast<std::uint32_t>(at_most(ends.store)));
    if (fs_ != nullptr) {
        for (std::size_t i = 0; i < at_most(ends.write); ++i) served.written += write(i);
    }
    return served;
}

// As the daemon does: by itself, without a parent, and not as a use.
bool Replay::promote(std::size_t i) {
    const auto granted = cpu_.grant(DAEMON, CHUNK_BYTES, 1);
    if (granted.empty()) return false;
    const Commit commit{granted[0], TENANT, keys_[i], {}};
    if (cpu_.commit(DAEMON, NAMESPACE, {&commit, 1}, 0, false)[0] != CommitCode::STORED) return false;
    in_cpu_[i] = Where::CPU;
    return true;
}

void Replay::touch() {
    some_keys_.clear();
    for (std::size_t i = 0; i < keys_.size(); ++i) {
        if (has(i)) some_keys_.push_back(keys_[i]);
    }
    cpu_.touch(NAMESPACE, TENANT, some_keys_, 0);
    if (fs_ == nullptr) return;
    some_keys_.clear();
    for (std::size_t i = 0; i < keys_.size(); ++i) {
        if (in_fs_[i] == Where::CPU) some_keys_.push_back(keys_[i]);
    }
    fs_->touch(NAMESPACE, TENANT, some_keys_, 0);
}

std::uint32_t Replay::store(std::uint32_t store_end) {
    std::uint32_t stored = 0;
    std::size_t next = 0;
    std::optional<Ref> tail;  // of the chain: it stays put while room is made for the rest
    while (true) {
        for (; next < store_end && has(next); ++next) tail.reset();
        if (next == store_end) break;
        if (!tail && next > 0) tail = cpu_.place_of(NAMESPACE, TENANT, keys_[next - 1]);
        std::size_t end = next;
        while (end < store_end && !has(end) && end - next < grants_max_) ++end;
        if (tail) cpu_.lease(ENGINE, {&*tail, 1}, UINT64_MAX);
        const auto granted = cpu_.grant(ENGINE, CHUNK_BYTES, end - next);
        if (tail) cpu_.release(ENGINE, {&*tail, 1});
        if (granted.empty()) break;
        commits_.clear();
        for (const Ref& ref : granted) {
            const std::size_t i = next + commits_.size();
            commits_.push_back({ref, TENANT, keys_[i], i > 0 ? keys_[i - 1] : Bytes{}});
        }
        for (const CommitCode code : cpu_.commit(ENGINE, NAMESPACE, commits_, 0)) {
            if (code == CommitCode::STORED) {
                in_cpu_[next] = Where::CPU;
                ++stored;
            }
            ++next;
        }
        tail = granted.back();
        if (!has(next - 1)) tail.reset();
    }
    some_keys_.clear();  // wanted, and refused
    for (std::size_t i = std::min<std::size_t>(next, store_end); i < keys_.size(); ++i) {
        if (!has(i)) some_keys_.push_back(keys_[i]);
    }
    cpu_.touch(NAMESPACE, TENANT, some_keys_, 0);
    return stored;
}

// What is new in the upper tier is also written to the lower one.
std::uint32_t Replay::write(std::size_t i) {
    if (!has(i) || in_fs_[i] == Where::CPU) return 0;
    const auto granted = fs_->grant(ENGINE, CHUNK_BYTES, 1);
    if (granted.empty()) return 0;
    const Commit commit{granted[0], TENANT, keys_[i], {}};
    return fs_->commit(ENGINE, NAMESPACE, {&commit, 1}, 0)[0] == CommitCode::STORED ? 1 : 0;
}

}  // namespace kvstore
