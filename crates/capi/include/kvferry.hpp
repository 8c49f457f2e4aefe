// Owners for the handles of kvferry.h, and exceptions for its errors. C++17, header only.
#ifndef KVFERRY_HPP
#define KVFERRY_HPP

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvferry.h"

namespace kvferry {

// What a call has ended with that is neither KVF_OK nor KVF_PENDING.
class error : public std::runtime_error {
 public:
  explicit error(kvf_status status)
      : std::runtime_error(kvf_last_error()), status_(status), kind_(kvf_last_error_kind()) {}

  kvf_status status() const noexcept { return status_; }
  // The name of the case, as the library's documentation has it.
  const std::string &kind() const noexcept { return kind_; }

 private:
  kvf_status status_;
  std::string kind_;
};

// Throws unless a call has ended well.
inline void check(kvf_status status) {
  if (status != KVF_OK) throw error(status);
}

// Whether what was waited for has happened. Throws what went wrong otherwise.
inline bool happened(kvf_status status) {
  if (status == KVF_PENDING) return false;
  check(status);
  return true;
}

// Throws if this was compiled with the header of another library.
inline void check_version() {
  if (kvf_abi_version() != KVF_ABI_VERSION) throw std::runtime_error("kvferry.h is not of this libkvferry_c");
}

template <auto Free>
struct deleter {
  template <class Handle>
  void operator()(Handle *handle) const noexcept {
    Free(handle);
  }
};

template <class Handle, auto Free>
using owner = std::unique_ptr<Handle, deleter<Free>>;

using agent = owner<kvf_agent, kvf_agent_free>;
using engine = owner<kvf_engine, kvf_engine_free>;
using instance = owner<kvf_instance, kvf_instance_free>;
using link = owner<kvf_link, kvf_link_free>;
using list = owner<kvf_list, kvf_list_free>;
using memory = owner<kvf_memory, kvf_memory_free>;
using move = owner<kvf_move, kvf_move_free>;
using notifications = owner<kvf_notifications, kvf_notifications_free>;
using plan = owner<kvf_plan, kvf_plan_free>;
using region = owner<kvf_region, kvf_region_free>;
using table = owner<kvf_table, kvf_table_free>;
using transfer = owner<kvf_transfer, kvf_transfer_free>;

// Calls a function whose last argument is where it writes a handle: make<kvferry::agent>(kvf_agent_start, &options).
template <class Owner, class Function, class... Arguments>
Owner make(Function function, Arguments... arguments) {
  typename Owner::pointer handle = nullptr;
  check(function(arguments..., &handle));
  return Owner(handle);
}

// Bytes that the library has written.
class bytes {
 public:
  // Calls a function whose last argument is where it writes bytes.
  template <class Function, class... Arguments>
  static bytes of(Function function, Arguments... arguments) {
    bytes made;
    check(function(arguments..., &made.bytes_));
    return made;
  }

  bytes(bytes &&other) noexcept : bytes_(std::exchange(other.bytes_, kvf_bytes{})) {}
  bytes &operator=(bytes &&other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~bytes() { kvf_bytes_free(bytes_); }

  kvf_slice slice() const noexcept { return {bytes_.data, bytes_.length}; }
  std::string str() const { return {reinterpret_cast<const char *>(bytes_.data), bytes_.length}; }

 private:
  bytes() noexcept : bytes_{} {}
  kvf_bytes bytes_;
};

}  // namespace kvferry

#endif  // KVFERRY_HPP
