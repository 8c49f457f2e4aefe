// Two agents, of which one writes every other block of its memory into the other's, in reverse order, and tells it: the level of
// addresses. See ci/capi for how it is built.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "kvferry.hpp"

namespace {

constexpr std::uint64_t BLOCKS = 64, BLOCK_BYTES = 4096, TIMEOUT_MS = 30000;

kvferry::agent start(const char *name) {
  kvf_agent_options options{};
  options.name = name;
  return kvferry::make<kvferry::agent>(kvf_agent_start, &options);
}

std::vector<kvf_run> blocks(std::uint64_t base) {
  std::vector<kvf_run> runs;
  for (std::uint64_t block = 0; block < BLOCKS; block++) runs.push_back({base + block * BLOCK_BYTES, BLOCK_BYTES});
  return runs;
}

void expect(bool holds, const char *what) {
  if (!holds) throw std::runtime_error(what);
}

void run() {
  kvferry::check_version();
  auto source = start("prefill"), target = start("decode");

  // The source's memory is its own, the target's the agent's, which the source can map.
  std::vector<std::uint8_t> from(BLOCKS * BLOCK_BYTES);
  for (std::size_t at = 0; at < from.size(); at++) from[at] = static_cast<std::uint8_t>(at * 7 + at / BLOCK_BYTES);
  auto from_base = reinterpret_cast<std::uintptr_t>(from.data());
  auto from_memory = kvferry::make<kvferry::memory>(kvf_agent_register, source.get(), std::uint64_t{from_base},
                                                    std::uint64_t{from.size()}, false, nullptr, nullptr);
  auto to_memory = kvferry::make<kvferry::memory>(kvf_agent_allocate, target.get(), std::uint64_t{from.size()}, false);
  const std::uint64_t to_base = kvf_memory_base(to_memory.get());

  auto metadata = kvferry::bytes::of(kvf_agent_metadata, target.get());
  auto name = kvferry::bytes::of(kvf_agent_add_remote, source.get(), metadata.slice());
  expect(name.str() == "decode", "the name of the remote agent");

  auto here = blocks(from_base), there = blocks(to_base);
  auto local = kvferry::make<kvferry::list>(kvf_agent_prepare_local, source.get(), false, here.data(), here.size());
  auto remote =
      kvferry::make<kvferry::list>(kvf_agent_prepare_remote, source.get(), "decode", false, there.data(), there.size());

  std::vector<std::uint64_t> sent, received;
  for (std::uint64_t block = 0; block < BLOCKS; block += 2) {
    sent.push_back(block);
    received.push_back(BLOCKS - 1 - block);
  }
  const char text[] = "there";
  kvf_slice message{reinterpret_cast<const std::uint8_t *>(text), sizeof text - 1};
  auto transfer = kvferry::make<kvferry::move>(kvf_agent_make, source.get(), false, local.get(), sent.data(), sent.size(),
                                               remote.get(), received.data(), received.size(), &message);
  for (int round = 0; round < 2; round++) {
    kvferry::check(kvf_move_post(transfer.get()));
    expect(kvferry::happened(kvf_move_wait(transfer.get(), TIMEOUT_MS)), "the transfer ends");
    auto heard = kvferry::make<kvferry::notifications>(kvf_agent_notifications, target.get(), TIMEOUT_MS);
    expect(kvf_notifications_count(heard.get()) == 1, "one notification");
    const char *sender = nullptr;
    kvf_slice said{};
    kvferry::check(kvf_notifications_at(heard.get(), 0, &sender, &said));
    expect(std::strcmp(sender, "prefill") == 0 && said.length == 5 && std::memcmp(said.data, "there", 5) == 0,
           "who said it, and what");
  }

  // Told is there: every second block, and nothing between.
  const auto *to = reinterpret_cast<const std::uint8_t *>(static_cast<std::uintptr_t>(to_base));
  for (std::uint64_t block = 0; block < BLOCKS; block++) {
    const std::uint64_t other = BLOCKS - 1 - block;
    const std::vector<std::uint8_t> zeros(BLOCK_BYTES);
    const std::uint8_t *expected = other % 2 == 0 ? from.data() + other * BLOCK_BYTES : zeros.data();
    expect(std::memcmp(to + block * BLOCK_BYTES, expected, BLOCK_BYTES) == 0, "every byte");
  }

  // What goes wrong is an exception with a status, a kind and a message.
  try {
    kvf_run outside{from_base + from.size(), 1};
    kvferry::make<kvferry::list>(kvf_agent_prepare_local, source.get(), false, &outside, std::size_t{1});
    expect(false, "memory that is not registered is refused");
  } catch (const kvferry::error &error) {
    expect(error.status() == KVF_PREPARE && error.kind() == "Local", error.what());
  }
  kvferry::check(kvf_agent_deregister(source.get(), from_memory.get(), TIMEOUT_MS));
  expect(kvf_move_post(transfer.get()) == KVF_POST, "memory that is not registered any more is refused");
  std::cout << sent.size() << " blocks arrived twice, every byte is right\n";
}

}  // namespace

int main() {
  try {
    run();
    return EXIT_SUCCESS;
  } catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
