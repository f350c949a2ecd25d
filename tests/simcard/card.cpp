// A simulated accelerator for tests: it plays a CUDA-like card on the CPU, for a torch without CUDA.
//
// Written against the public headers of the torch wheel only. It is the device type "cuda", so that the code under test
// runs unchanged.
//
// Rules that it keeps, because the code under test depends on them:
//  * each stream is a thread with a queue; kernels and copies run there, later than the call that queued them;
//  * a kernel waits for earlier work of its stream and for events that its stream was told to wait for, for nothing else;
//  * kernels hold addresses, not tensors: memory that was freed is given to the next allocation of the same stream at
//    once, and kernels of other streams see it change, unless record_stream was called;
//  * a non-blocking copy from or to page-locked memory touches it when it runs; pageable memory is staged or waited for;
//  * host tensors with dimensions are refused as operands, as a real card does.
// Switches: random delays for each task of compute streams and of other streams; freed memory is overwritten.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "../gfx1100/blas.h"

#define SIM_KEY CUDA

namespace sim {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using clk = std::chrono::steady_clock;

constexpr auto kSim = c10::DeviceType::SIM_KEY;
constexpr int kDevices = 2, kStreams = 33;
std::atomic<int> cards{1};
DeviceIndex visible() { return DeviceIndex(cards.load()); }

// ---- switches -------------------------------------------------------------------------------------------------
struct Delay { std::atomic<int> low{0}, high{0}; };
Delay compute_delay, copy_delay;
std::atomic<uint64_t> seed{1};
std::atomic<bool> poison{false};
std::atomic<int64_t> capacity{int64_t(20) << 30}, kernels_async{0}, kernels_sync{0}, copies_async{0}, copies_sync{0};
std::atomic<int64_t> to_card{0}, to_host{0}, waits{0}, harmed{0};
struct Harm {
  std::atomic<int> kind{0};  // none, flip, zero, drop, stale
  std::atomic<double> rate{0};
  std::atomic<int64_t> smallest{1};  // bytes
};
Harm harms[2];  // of copies to the card, and to the host
std::atomic<double> wrong_rate{0};  // of matrix products
std::mt19937_64 wrong_rng;          // of compute streams' threads, under its lock
std::mutex wrong_lock;
std::atomic<int> refusal{0};  // what is said where there is no memory: torch's own error, accelerator, driver, blas, exit
std::atomic<int64_t> library{0};  // bytes outside the allocator for each thread that multiplies matrices on a card

// ---- what the host did, told to whoever listens: 0 bytes to the card, 1 bytes to the host, 2 a wait, 3 a context, 4 a harmed copy
using Hook = void (*)(int, int, int64_t);
std::atomic<Hook> hook{nullptr};
void tell(int kind, DeviceIndex dev, int64_t bytes = 0) {
  if (kind < 3) (kind == 0 ? to_card : kind == 1 ? to_host : waits) += kind == 2 ? 1 : bytes;
  if (auto h = hook.load()) h(kind, dev, bytes);
}
std::atomic<bool> touched[kDevices];
void touch(int dev) {  // the first time a real card makes a context, which takes half a GB of its memory
  if (!touched[dev].exchange(true)) tell(3, DeviceIndex(dev));
}

void nap(const Delay& delay, std::mt19937_64& rng) {
  const int high = delay.high.load();
  if (high > 0) {
    const int low = delay.low.load();
    const int us = low + int(rng() % uint64_t(high - low + 1));
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
}

// ---- errors: raised at the next wait, as on a card ---------------------------------------------------------------
std::mutex error_lock;
std::string error_text;
void set_error(const std::string& what) {
  std::lock_guard<std::mutex> g(error_lock);
  if (error_text.empty()) error_text = what;
}
void raise_error() {
  std::string what;
  {
    std::lock_guard<std::mutex> g(error_lock);
    what.swap(error_text);
  }
  TORCH_CHECK(what.empty(), "simulated card: a kernel failed: ", what);
}

// ---- streams -------------------------------------------------------------------------------------------------
struct Queue {
  std::mutex m;
  std::condition_variable cv, progress;
  std::deque<std::function<void()>> tasks;
  uint64_t submitted = 0, done = 0;
  bool started = false;
  int dev = 0;
  StreamId id = 0;

  uint64_t push(std::function<void()> task) {
    touch(dev);
    std::lock_guard<std::mutex> g(m);
    if (!started) {
      started = true;
      std::thread([this] { loop(); }).detach();
    }
    tasks.push_back(std::move(task));
    cv.notify_one();
    return ++submitted;
  }
  void wait() {
    std::unique_lock<std::mutex> g(m);
    const uint64_t upto = submitted;
    progress.wait(g, [&] { return done >= upto; });
  }
  bool idle() {
    std::lock_guard<std::mutex> g(m);
    return done >= submitted;
  }
  void loop() {
    std::mt19937_64 rng(seed.load() * 1000003 + uint64_t(dev) * 101 + uint64_t(id));
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> g(m);
        cv.wait(g, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      nap(id == 0 ? compute_delay : copy_delay, rng);
      try {
        task();
      } catch (const std::exception& e) {
        set_error(e.what());
      }
      task = nullptr;
      std::lock_guard<std::mutex> g(m);
      ++done;
      progress.notify_all();
    }
  }
};

Queue& queue(DeviceIndex dev, StreamId id) {
  static Queue* all = [] {
    auto* q = new Queue[kDevices * kStreams];
    for (int i = 0; i < kDevices * kStreams; ++i) {
      q[i].dev = i / kStreams;
      q[i].id = i % kStreams;
    }
    return q;
  }();
  return all[dev * kStreams + id];
}
Queue& queue(const Stream& s) { return queue(s.device_index(), s.id()); }

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kDevices] = {};
DeviceIndex index_of(Device d) { return d.index() < 0 ? current_device : d.index(); }
Stream stream_of(DeviceIndex dev) { return Stream(Stream::UNSAFE, Device(kSim, dev), current_stream[dev]); }
void check_device(DeviceIndex dev) { TORCH_CHECK(dev >= 0 && dev < visible(), "simulated card: invalid device ordinal ", int(dev)); }

struct EventState {
  std::mutex m;
  std::condition_variable cv;
  uint64_t recorded = 0, reached = 0;
  int dev = 0;
  clk::time_point when;
};
using Event = std::shared_ptr<EventState>;
void event_record(const Event& e, Queue& q) {
  uint64_t version;
  {
    std::lock_guard<std::mutex> g(e->m);
    version = ++e->recorded;
    e->dev = q.dev;
  }
  q.push([e, version] {
    std::lock_guard<std::mutex> g(e->m);
    e->reached = std::max(e->reached, version);
    e->when = clk::now();
    e->cv.notify_all();
  });
}
void event_wait_version(const Event& e, uint64_t version) {
  std::unique_lock<std::mutex> g(e->m);
  e->cv.wait(g, [&] { return e->reached >= version; });
}
uint64_t event_version(const Event& e) {
  std::lock_guard<std::mutex> g(e->m);
  return e->recorded;
}
void event_block(const Event& e, Queue& q) {
  const uint64_t version = event_version(e);
  q.push([e, version] { event_wait_version(e, version); });
}
bool event_query(const Event& e) {
  std::lock_guard<std::mutex> g(e->m);
  return e->reached >= e->recorded;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    check_device(d.index());
    const auto old = current_device;
    current_device = d.index();
    return Device(kSim, old);
  }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device d) const override { check_device(index_of(d)); current_device = index_of(d); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Stream getStream(Device d) const override { return stream_of(index_of(d)); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kSim, index_of(d)), 0); }
  Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<uint64_t> next[kDevices];
    const auto dev = index_of(d);
    check_device(dev);
    return Stream(Stream::UNSAFE, Device(kSim, dev), 1 + StreamId(next[dev]++ % (kStreams - 1)));
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    const auto old = stream_of(s.device_index());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue(s); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (*e == nullptr) *e = new Event(std::make_shared<EventState>());
    event_record(*static_cast<Event*>(*e), queue(s));
  }
  void block(void* e, const Stream& s) const override {
    if (e) event_block(*static_cast<Event*>(e), queue(s));
  }
  bool queryEvent(void* e) const override { return !e || event_query(*static_cast<Event*>(e)); }
  DeviceIndex deviceCount() const noexcept override { return visible(); }
  bool queryStream(const Stream& s) const override { return queue(s).idle(); }
  void synchronizeStream(const Stream& s) const override { tell(2, s.device_index()); queue(s).wait(); raise_error(); }
  void synchronizeEvent(void* e) const override {
    tell(2, e ? DeviceIndex((*static_cast<Event*>(e))->dev) : current_device);
    if (e) event_wait_version(*static_cast<Event*>(e), event_version(*static_cast<Event*>(e)));
    raise_error();
  }
  void synchronizeDevice(const DeviceIndex dev) const override {
    tell(2, dev);
    for (StreamId id = 0; id < kStreams; ++id) queue(dev, id).wait();
    raise_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override;
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    auto &x = *static_cast<Event*>(a), &y = *static_cast<Event*>(b);
    TORCH_CHECK(event_query(x) && event_query(y), "simulated card: both events must have been reached");
    return std::chrono::duration<double, std::milli>(y->when - x->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(SIM_KEY, Guard)

// ---- device memory: a caching allocator with record_stream ---------------------------------------------------------
struct Block {
  void* ptr;
  size_t size;
  DeviceIndex dev;
  StreamId stream;
  std::set<std::pair<int, StreamId>> far_uses;
  int state;  // 0 free, 1 in use, 2 freed and awaited by another stream
  size_t used;  // of `size`, what counts as allocated: torch's allocator splits a block and counts what was asked for
  size_t asked;
};
struct Memory {
  std::mutex m;
  std::map<StreamId, std::map<size_t, std::vector<Block*>>> free;
  std::map<void*, Block*> all;
  std::vector<std::pair<std::vector<Event>, Block*>> waiting;
  int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, reused = 0, fresh = 0, ooms = 0, retries = 0;
  int64_t outside = 0;  // held by libraries and other processes
};
Memory& memory(DeviceIndex dev) {
  static Memory* all = new Memory[kDevices];
  return all[dev];
}
void overwrite(Block* b, int value) {
  if (poison.load()) {
    void* p = b->ptr;
    const size_t n = b->size;
    queue(b->dev, b->stream).push([p, n, value] { std::memset(p, value, n); });
  }
}
void to_free_list(Memory& mem, Block* b) {
  overwrite(b, 0xDB);
  b->state = 0;
  mem.free[b->stream][b->size].push_back(b);
}
void look_at_events(Memory& mem) {
  for (auto it = mem.waiting.begin(); it != mem.waiting.end();) {
    bool over = true;
    for (auto& e : it->first) over = over && event_query(e);
    if (over) {
      to_free_list(mem, it->second);
      it = mem.waiting.erase(it);
    } else {
      ++it;
    }
  }
}
void release(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  auto& mem = memory(b->dev);
  std::lock_guard<std::mutex> g(mem.m);
  mem.allocated -= int64_t(b->used);
  if (b->far_uses.empty()) {
    to_free_list(mem, b);
    return;
  }
  std::vector<Event> events;
  for (auto& [dev, id] : b->far_uses) {
    events.push_back(std::make_shared<EventState>());
    event_record(events.back(), queue(DeviceIndex(dev), id));
  }
  b->far_uses.clear();
  b->state = 2;
  mem.waiting.emplace_back(std::move(events), b);
}
void drop_cache(Memory& mem, DeviceIndex dev) {
  for (StreamId id = 0; id < kStreams; ++id) queue(dev, id).wait();
  std::lock_guard<std::mutex> g(mem.m);
  look_at_events(mem);
  for (StreamId id = 0; id < kStreams; ++id) queue(dev, id).wait();
  for (auto& [stream, sizes] : mem.free)
    for (auto& [size, blocks] : sizes) {
      for (auto* b : blocks) {
        mem.reserved -= int64_t(b->size);
        mem.all.erase(b->ptr);
        std::free(b->ptr);
        delete b;
      }
      blocks.clear();
    }
}
// The words of CUDA and HIP where torch's allocator was not asked, or not alone: a failed call to the runtime, to the
// driver, to the BLAS library, and bitsandbytes, which ends the process (csrc/compat.cuh).
[[noreturn]] void refuse(int how, size_t size, DeviceIndex dev) {
  if (how == 1) {
    const std::string text = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call";
    throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 2, text);
  }
  TORCH_CHECK(how != 2, "CUDA driver error: out of memory");
  TORCH_CHECK(how != 3, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`");
  if (how == 4) {
    std::fprintf(stderr, "Error out of memory at line 88 in file /src/csrc/ops.cu\n");
    std::exit(1);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes on the simulated card ", int(dev));
  std::abort();
}
void blas_handle(const std::string& op, DeviceIndex dev) {  // one for each thread and card, outside the allocator
  static thread_local bool has[kDevices] = {};
  if (has[dev] || !library.load() || (op != "aten::mm" && op != "aten::addmm" && op != "aten::bmm" && op != "aten::baddbmm")) return;
  auto& mem = memory(dev);
  {
    std::lock_guard<std::mutex> g(mem.m);
    if (mem.reserved + mem.outside + library.load() <= capacity.load()) {
      mem.outside += library.load();
      has[dev] = true;
    }
  }
  if (!has[dev]) refuse(3, 0, dev);
}
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const auto dev = current_device;
    touch(dev);
    if (n == 0) return {nullptr, nullptr, &release_nothing, Device(kSim, dev)};
    const size_t unit = n > (1 << 20) ? (2 << 20) : 512;
    const size_t size = (n + unit - 1) / unit * unit, used = (n + 511) / 512 * 512;
    auto& mem = memory(dev);
    auto* b = take(mem, dev, current_stream[dev], size, used, n);
    if (!b) {
      ++mem.retries;
      drop_cache(mem, dev);
      b = take(mem, dev, current_stream[dev], size, used, n);
    }
    if (!b) {
      ++mem.ooms;
      refuse(refusal.load(), size, dev);
    }
    overwrite(b, 0xCD);
    return {b->ptr, b, &release, Device(kSim, dev)};
  }
  static void release_nothing(void*) {}
  static Block* take(Memory& mem, DeviceIndex dev, StreamId stream, size_t size, size_t used, size_t asked) {
    std::lock_guard<std::mutex> g(mem.m);
    look_at_events(mem);
    Block* b = nullptr;
    auto& sizes = mem.free[stream];
    for (auto it = sizes.lower_bound(size); it != sizes.end() && it->first <= 2 * size; ++it)
      if (!it->second.empty()) {
        b = it->second.back();
        it->second.pop_back();
        ++mem.reused;
        break;
      }
    if (!b) {
      if (mem.reserved + mem.outside + int64_t(size) > capacity.load()) return nullptr;
      b = new Block{std::aligned_alloc(512, size), size, dev, stream, {}, 0, 0, 0};
      mem.all[b->ptr] = b;
      if (poison.load()) std::memset(b->ptr, 0xCD, size);
      mem.reserved += int64_t(size);
      mem.reserved_peak = std::max(mem.reserved_peak, mem.reserved);
      ++mem.fresh;
    }
    b->state = 1;
    b->used = used;
    b->asked = asked;
    mem.allocated += int64_t(used);
    mem.peak = std::max(mem.peak, mem.allocated);
    return b;
  }
  void copy_data(void* dest, const void* src, std::size_t n) const override { default_copy_data(dest, src, n); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (DeviceIndex dev = 0; dev < kDevices; ++dev) drop_cache(memory(dev), dev);
  }
  void recordStream(const c10::DataPtr& p, Stream s) override {
    if (p.get_deleter() != &release) return;
    auto* b = static_cast<Block*>(p.get_context());
    auto& mem = memory(b->dev);
    std::lock_guard<std::mutex> g(mem.m);
    if (s.id() != b->stream || s.device_index() != b->dev) b->far_uses.insert({s.device_index(), s.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex dev) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& mem = memory(dev);
    std::lock_guard<std::mutex> g(mem.m);
    for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[0].current = mem.allocated;
      (*each)[0].peak = mem.peak;
    }
    stats.reserved_bytes[0].current = mem.reserved;
    stats.reserved_bytes[0].peak = mem.reserved_peak;
    stats.num_device_alloc = mem.fresh;
    stats.num_ooms = mem.ooms;
    stats.num_alloc_retries = mem.retries;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex dev) override {
    auto& mem = memory(dev);
    std::lock_guard<std::mutex> g(mem.m);
    mem.peak = mem.allocated;
    mem.reserved_peak = mem.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex dev) override {
    auto& mem = memory(dev);
    std::lock_guard<std::mutex> g(mem.m);
    return {size_t(capacity.load() - mem.reserved - mem.outside), size_t(capacity.load())};
  }
};
Allocator* allocator() {
  static auto* one = new Allocator;
  return one;
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const { allocator()->recordStream(p, s); }

// ---- page-locked host memory ----------------------------------------------------------------------------------------
std::mutex pinned_lock;
std::map<char*, size_t>& pinned() {
  static auto* all = new std::map<char*, size_t>;
  return *all;
}
bool is_pinned_ptr(const void* p) {
  std::lock_guard<std::mutex> g(pinned_lock);
  auto it = pinned().upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (it == pinned().begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}
struct HostImpl : at::CachingHostAllocatorImpl<Stream, Event> {
  void allocate_host_memory(size_t size, void** ptr) override {
    *ptr = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    std::lock_guard<std::mutex> g(pinned_lock);
    pinned()[static_cast<char*>(*ptr)] = size;
  }
  void free_block(at::HostBlock<Stream>* block) override {
    {
      std::lock_guard<std::mutex> g(pinned_lock);
      pinned().erase(static_cast<char*>(block->ptr_));
    }
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<Event>>& events, Stream s) override {
    events->push_back(std::make_shared<EventState>());
    event_record(events->back(), queue(s));
  }
  bool query_event(Event& e) override { return event_query(e); }
  Stream get_current_stream() const override { return stream_of(current_device); }
  bool stream_is_capturing(Stream) const override { return false; }
};
void host_free(void* ctx);
struct HostAllocator final : at::CachingHostAllocatorInterface<HostImpl, host_free> {};
HostAllocator* host_allocator() {
  static auto* one = new HostAllocator;
  return one;
}
void host_free(void* ctx) { host_allocator()->free(ctx); }
struct Registrations {
  Registrations() {
    c10::SetAllocator(kSim, allocator(), 255);
    at::setHostAllocator(kSim, host_allocator(), 255);
  }
} registrations;

// ---- random numbers: a host generator per device ---------------------------------------------------------------------
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex dev)
      : GeneratorImpl(Device(kSim, dev), c10::DispatchKeySet(c10::DispatchKey::SIM_KEY)), inner(at::detail::createCPUGenerator()) {}
  at::Generator inner;
  void settle() const {
    for (StreamId id = 0; id < kStreams; ++id) queue(device_.index(), id).wait();
  }
  void set_current_seed(uint64_t s) override { settle(); inner.set_current_seed(s); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { settle(); return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    settle();
    std::lock_guard<std::mutex> g(inner.mutex());
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};
at::Generator& default_generator(DeviceIndex dev) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < kDevices; ++i) v->push_back(at::make_generator<Generator>(i));
    return v;
  }();
  return (*all)[dev < 0 ? current_device : dev];
}

// ---- hooks ---------------------------------------------------------------------------------------------------------
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return false; }
  int getNumGPUs() const override { return visible(); }
  DeviceIndex current_device() const override { return sim::current_device; }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  void deviceSynchronize(DeviceIndex dev) const override { Guard().synchronizeDevice(dev); }
  std::string showConfig() const override { return "simulated card"; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return visible(); }
  void setCurrentDevice(DeviceIndex d) const override { check_device(d); sim::current_device = d; }
  DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { const auto old = sim::current_device; setCurrentDevice(d); return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { const auto old = sim::current_device; if (d >= 0) setCurrentDevice(d); return old; }
  bool isPinnedPtr(const void* p) const override { return is_pinned_ptr(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  Device getDeviceFromPtr(void*) const override { return Device(kSim, sim::current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d = -1) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d = -1) const override { return at::make_generator<Generator>(d < 0 ? sim::current_device : d); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

// ---- tensors as kernels see them: addresses ---------------------------------------------------------------------------
struct View {
  void* data = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool defined = false, wrapped = false;
  Tensor host;  // a host scalar, by value
  View() = default;
  explicit View(const Tensor& t) {
    defined = t.defined();
    if (!defined) return;
    sizes = t.sizes().vec();
    strides = t.strides().vec();
    dtype = t.scalar_type();
    wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
    if (t.device().type() == kSim) {
      data = t.numel() ? static_cast<char*>(t.unsafeGetTensorImpl()->storage().mutable_data()) + t.storage_offset() * int64_t(t.element_size()) : nullptr;
    } else {
      host = t.detach().clone();
    }
  }
  Tensor tensor() const {
    if (!defined) return Tensor();
    Tensor t = host.defined() ? host
        : data ? at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype))
               : at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype));
    if (wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }
  Tensor meta() const {
    if (!defined) return Tensor();
    if (host.defined()) return tensor().clone();  // a host scalar stays one; Python may keep this, and frees it with its lock
    Tensor t = at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(at::kMeta));
    if (wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }
};
bool on_card(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// ---- copies -----------------------------------------------------------------------------------------------------------
void bytes_over(void* to, const void* from, size_t n);
void bytes_cross(bool down, void* target, const void* from, size_t n) {  // as faulty hardware does it, where that is asked for
  static thread_local std::mt19937_64 rng(seed.load() * 7919 + 11);
  static thread_local std::vector<char> earlier[2];  // what the copy before this one carried
  auto& harm = harms[down];
  const bool hit = harm.kind && int64_t(n) >= harm.smallest && std::uniform_real_distribution<double>(0, 1)(rng) < harm.rate;
  const int kind = hit ? harm.kind.load() : 0;
  char* to = static_cast<char*>(target);
  if (kind != 3) bytes_over(to, from, n);
  if (kind == 1) to[rng() % n] ^= char(1 << (rng() % 8));
  if (kind == 2) std::memset(to + n / 3, 0, n - n / 3);
  if (kind == 4) std::memcpy(to, earlier[down].data(), std::min(n, earlier[down].size()));
  if (kind) {
    ++harmed;
    tell(4, 0, int64_t(n));
  }
  if (harm.kind == 4) earlier[down].assign(static_cast<const char*>(from), static_cast<const char*>(from) + std::min<size_t>(n, 1 << 20));
}
void bytes_over(void* to, const void* from, size_t n) {  // in pieces, so that a copy can be seen half done
  static thread_local std::mt19937_64 rng(7);
  const size_t piece = copy_delay.high.load() > 0 ? std::max<size_t>(64, n / 4) : n;
  for (size_t at = 0; at < n; at += piece) {
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, std::min(piece, n - at));
    if (at + piece < n) nap(copy_delay, rng);
  }
}
// Operators by the CPU's code, on request: how often, and how many bytes they read and wrote.
std::atomic<bool> counting{false};
std::mutex operators_lock;
std::map<std::string, std::array<int64_t, 2>>& operators() {
  static auto* all = new std::map<std::string, std::array<int64_t, 2>>;
  return *all;
}
void note_operator(const std::string& name, int64_t bytes) {
  std::lock_guard<std::mutex> g(operators_lock);
  auto& row = operators()[name];
  ++row[0], row[1] += bytes;
}

Tensor& copy_(Tensor& self, const Tensor& src_in, bool non_blocking) {
  if (self.numel() == 0 && src_in.numel() == 0) return self;
  if (self.is_same(src_in)) return self;
  Tensor src = src_in.expand_as(self);
  if (on_card(self) && on_card(src)) {
    if (counting) note_operator("aten::copy_", int64_t(self.nbytes() + src_in.nbytes()));
    const auto from = src.device().index(), to = self.device().index();
    auto source = stream_of(from), target = stream_of(to);
    if (from != to) {  // both streams are held, as on a real card
      auto e = std::make_shared<EventState>();
      event_record(e, queue(target));
      event_block(e, queue(source));
    }
    queue(source).push([a = View(self), b = View(src)] {
      at::AutoDispatchBelowADInplaceOrView guard;
      a.tensor().copy_(b.tensor());
    });
    if (from != to) {
      auto e = std::make_shared<EventState>();
      event_record(e, queue(source));
      event_block(e, queue(target));
    }
    ++copies_async;
    return self;
  }
  const bool down = on_card(src);
  const Tensor& card = down ? src : self;
  const Tensor& host = down ? self : src;
  auto stream = stream_of(card.device().index());
  auto& q = queue(stream);
  tell(down ? 1 : 0, card.device().index(), int64_t(host.numel()) * int64_t(down ? src.element_size() : self.element_size()));
  const bool plain = self.is_contiguous() && src.is_contiguous() && self.scalar_type() == src.scalar_type();
  void* hp = host.unsafeGetTensorImpl()->storage().mutable_data();
  if (non_blocking && plain && is_pinned_ptr(hp)) {
    View v(card);
    char* h = static_cast<char*>(hp) + host.storage_offset() * int64_t(host.element_size());
    const size_t n = host.nbytes();
    if (n) q.push([v, h, n, down] { bytes_cross(down, down ? h : v.data, down ? v.data : h, n); });
    host_allocator()->record_event(hp, host.storage().data_ptr().get_context(), stream);
    ++copies_async;
    return self;
  }
  ++copies_sync;
  if (down) {
    Tensor landing = at::empty(src.sizes(), src.options().device(at::kCPU));
    void* lp = landing.data_ptr();
    q.push([v = View(src), lp] {
      at::AutoDispatchBelowADInplaceOrView guard;
      Tensor from = v.tensor().contiguous();
      if (from.numel()) bytes_cross(true, lp, from.data_ptr(), from.nbytes());
    });
    tell(2, card.device().index());
    q.wait();
    raise_error();
    at::AutoDispatchBelowADInplaceOrView guard;
    self.copy_(landing);
    return self;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  Tensor staged = src.detach().to(self.scalar_type(), false, true).contiguous();  // the driver has read it when the call returns
  q.push([v = View(self), staged] {
    at::AutoDispatchBelowADInplaceOrView inner;
    Tensor to = v.tensor();
    if (to.is_contiguous()) bytes_cross(false, to.data_ptr(), staged.data_ptr(), staged.nbytes());
    else to.copy_(staged);
  });
  if (!non_blocking) {
    tell(2, card.device().index());
    q.wait();
    raise_error();
  }
  return self;
}

// ---- tensors ----------------------------------------------------------------------------------------------------------
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::SIM_KEY);
Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(Device(kSim, index_of(device.value_or(Device(kSim)))));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(kSim, index_of(device.value_or(Device(kSim)))));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), kKeys, c10::dtype_or_default(dtype));
}
void room(const Tensor& t, size_t n) {
  auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (n <= storage->nbytes()) return;
  c10::DeviceGuard guard(t.device());
  auto fresh = allocator()->allocate(n);
  void *to = fresh.get(), *from = storage->mutable_data();
  const size_t old = storage->nbytes();
  if (old) queue(stream_of(t.device().index())).push([=] { std::memcpy(to, from, old); });
  storage->set_data_ptr(std::move(fresh));
  storage->set_nbytes(n);
}
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size_in, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(size_in);
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  room(self, (self.storage_offset() + self.numel()) * self.element_size());
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto n = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(c10::SymInt(n)), c10::SymIntArrayRef(c10::SymInt(1)));
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() != source.unsafeGetTensorImpl())
    set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
  return self;
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_whole(self, none);
}
Tensor unfold(const Tensor& self, int64_t d, int64_t size, int64_t step) { return at::native::unfold(self, d, size, step); }
void record_stream(Tensor& self, Stream s) { allocator()->recordStream(self.storage().data_ptr(), s); }
at::Scalar local_scalar(const Tensor& self) {
  auto& q = queue(stream_of(self.device().index()));
  tell(1, self.device().index(), int64_t(self.element_size()));
  tell(2, self.device().index());
  q.wait();
  raise_error();
  return View(self).tensor().item();
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

// The CPU's own takes no generator and would draw from the host's default one, beside the host's own drawing.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& in, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) return {in.clone(), at::ones_like(in, in.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(in, in.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {in.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {  // nor this for integers
  Tensor out = at::empty({bins}, self.options());
  queue(stream_of(self.device().index())).push([to = View(out), from = View(self), bins, low, high] {
    at::AutoDispatchBelowADInplaceOrView below;
    const bool whole = at::isIntegralType(from.dtype, true);
    to.tensor().copy_(at::histc(whole ? from.tensor().to(at::kDouble) : from.tensor(), bins, low, high));
  });
  return out;
}

// ---- every other operation: the CPU's, on the stream's thread -----------------------------------------------------------
using Args = std::vector<c10::IValue>;
template <class F>
c10::IValue each(const c10::IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t && t->defined() ? std::make_optional(f(*t)) : std::nullopt);
    return out;
  }
  return v;
}
struct Prepared {  // arguments without tensors, and what stands for the tensors
  Args rest;
  std::vector<std::vector<View>> views;
};
Args filled(const Prepared& p, const Args& shapes, bool meta) {
  Args out;
  for (size_t i = 0; i < shapes.size(); ++i) {
    size_t k = 0;
    auto v = each(shapes[i], [&](const Tensor&) { const View& w = p.views[i][k++]; return meta ? w.meta() : w.tensor(); });
    if (v.isDevice()) v = Device(meta ? at::kMeta : at::kCPU);
    out.push_back(std::move(v));
  }
  return out;
}
// The shapes of results follow from an operator and what `shape_key` writes of its arguments. They are kept: torch infers
// most of them in Python, which takes longer than a kernel of these tests.
template <class T>
void put(std::string& key, const T& value) { key.append(reinterpret_cast<const char*>(&value), sizeof value); }
template <class T>
void put_all(std::string& key, const T& values) {
  put(key, values.size());
  for (const auto& value : values) put(key, value);
}
void put(std::string& key, const View& view) {
  put(key, view.defined);
  if (!view.defined) return;
  put(key, view.dtype);
  put(key, view.wrapped);
  put_all(key, view.sizes);
  put_all(key, view.strides);
  if (view.host.defined()) key.append(static_cast<const char*>(view.host.const_data_ptr()), view.host.nbytes());
}
std::optional<std::string> shape_key(const std::string& op, const Prepared& prepared, const Args& args) {
  std::string key = op;
  put(key, at::get_default_dtype_as_scalartype());
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& value = args[i];
    key += value.tagKind();
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      put(key, prepared.views[i].size());
      for (const auto& view : prepared.views[i]) put(key, view);
      if (value.isOptionalTensorList())
        for (const auto& t : value.toOptionalTensorVector()) put(key, t && t->defined());
    } else if (value.isInt()) put(key, value.toInt());
    else if (value.isDouble()) put(key, value.toDouble());
    else if (value.isBool()) put(key, value.toBool());
    else if (value.isString()) key += value.toStringRef() + '\0';
    else if (value.isIntList()) put_all(key, value.toIntVector());
    else if (value.isDoubleList()) put_all(key, value.toDoubleVector());
    else if (!value.isNone() && !value.isDevice() && !value.isGenerator()) return std::nullopt;
  }
  return key;
}
std::mutex shapes_lock;
auto& known_shapes = *new std::unordered_map<std::string, Args>;  // never freed: threads outlive the end of a process
constexpr size_t most_shapes = 100'000;
std::optional<Args> shapes_of(const std::optional<std::string>& key) {
  if (!key) return std::nullopt;
  std::lock_guard<std::mutex> g(shapes_lock);
  const auto found = known_shapes.find(*key);
  return found == known_shapes.end() ? std::nullopt : std::make_optional(found->second);
}
void keep_shapes(const std::optional<std::string>& key, const Args& shapes) {
  if (!key) return;
  Args kept;  // of tensors that Python has never seen, and need not be freed with its lock
  for (const auto& value : shapes)
    kept.push_back(each(value, [](const Tensor& t) {
      return t.defined() ? at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(at::kMeta)) : Tensor();
    }));
  std::lock_guard<std::mutex> g(shapes_lock);
  if (known_shapes.size() < most_shapes) known_shapes.emplace(*key, std::move(kept));
}
std::mutex no_meta_lock;
std::set<std::string> no_meta{"aten::native_layer_norm"};  // its statistics: the CPU's have the input's dtype, meta's float32

// A kernel that leaves a tile of its product at zero. Not of a check's, an adapter's or a vocabulary's width.
void spoil(const Tensor& product, int64_t inner) {
  const int64_t rows = product.size(0), columns = product.size(1);
  if (wrong_rate.load() == 0 || std::min({inner, rows, columns}) < 17 || std::max(inner, columns) > 256) return;
  std::lock_guard<std::mutex> g(wrong_lock);
  if (std::uniform_real_distribution<double>(0, 1)(wrong_rng) < wrong_rate) product.narrow(0, 0, 16).narrow(1, 0, 16).zero_();
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  Args args(stack->end() - int64_t(n), stack->end());
  torch::jit::drop(*stack, n);
  const std::string name = schema.name();
  // the card, and refusal of host tensors
  std::optional<Device> dev;
  bool host_operand = false;
  for (auto& v : args) {
    if (v.isDevice() && v.toDevice().type() == kSim && !dev) dev = Device(kSim, index_of(v.toDevice()));
    each(v, [&](const Tensor& t) {
      if (!t.defined()) return t;
      if (t.device().type() == kSim) {
        TORCH_CHECK(!dev || *dev == t.device() || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
                    *dev, " and ", t.device(), " (", name, ")");
        if (!dev) dev = t.device();
      } else if (t.dim() > 0) {
        host_operand = true;
      }
      return t;
    });
  }
  TORCH_CHECK(dev.has_value(), "simulated card: no device for ", name);
  TORCH_CHECK(!host_operand || name.find("index") != std::string::npos, "Expected all tensors to be on the same device, but found at least two devices, ",
              *dev, " and cpu (", name, ")");
  if (host_operand)  // an index: torch's own kernels send it to the card by a copy like any other
    for (auto& v : args)
      v = each(v, [&](const Tensor& t) { return t.defined() && t.dim() > 0 && t.device().type() != kSim ? t.to(*dev) : t; });
  c10::DeviceGuard guard(*dev);
  blas_handle(name, dev->index());
  auto& q = queue(stream_of(dev->index()));
  auto prepared = std::make_shared<Prepared>();
  for (auto& v : args) {
    if (v.isGenerator() && v.toGenerator().device().type() == kSim)
      v = static_cast<Generator*>(v.toGenerator().unsafeGetGeneratorImpl())->inner;
    prepared->views.emplace_back();
    each(v, [&](const Tensor& t) { prepared->views.back().emplace_back(t); return t; });
  }
  for (size_t i = 0; i < n; ++i)  // random operations without a generator use the card's
    if (args[i].isNone() && schema.arguments()[i].type()->str().find("Generator") != std::string::npos)
      args[i] = static_cast<Generator*>(default_generator(dev->index()).unsafeGetGeneratorImpl())->inner;

  // which results are arguments, which are new
  const auto& returns = schema.returns();
  bool tensors_only = true, any_new = false, out_variant = false;
  std::vector<int> from(returns.size(), -1);
  for (size_t r = 0; r < returns.size(); ++r) {
    const auto* alias = returns[r].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < n; ++i) {
        const auto* given = schema.arguments()[i].alias_info();
        if (given && given->isWrite() && given->beforeSets() == alias->beforeSets()) from[r] = int(i);
      }
    } else {
      TORCH_CHECK(!alias, "simulated card: no kernel for the view operation ", name);
      any_new = true;
      const auto kind = returns[r].type()->kind();
      tensors_only = tensors_only && (kind == c10::TypeKind::TensorType || returns[r].type()->str() == "Tensor[]" || returns[r].type()->str() == "List[Tensor]");
    }
  }
  for (const auto& a : schema.arguments()) out_variant = out_variant || a.is_out();

  const std::string full = c10::toString(schema.operator_name());
  std::optional<Args> shapes;  // results on "meta"
  if (tensors_only && (any_new || out_variant)) {
    bool known_bad;
    {
      std::lock_guard<std::mutex> g(no_meta_lock);
      known_bad = no_meta.count(full) != 0;
    }
    const auto key = known_bad ? std::nullopt : shape_key(full, *prepared, args);
    shapes = shapes_of(key);
    if (!known_bad && !shapes) {
      try {
        at::AutoDispatchBelowADInplaceOrView below;
        auto metas = filled(*prepared, args, true);
        torch::jit::Stack s(metas.begin(), metas.end());
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &s);
        shapes = Args(s.begin(), s.end());
        keep_shapes(key, *shapes);
      } catch (const std::exception& e) {
        if (std::getenv("SIMCARD_DEBUG")) std::fprintf(stderr, "simcard: no meta for %s: %s\n", full.c_str(), e.what());
        std::lock_guard<std::mutex> g(no_meta_lock);
        no_meta.insert(full);
      }
    }
    for (size_t r = 0; shapes && r < returns.size(); ++r) {
      if (from[r] < 0) continue;
      const size_t given = size_t(from[r]);
      if (!schema.arguments()[given].is_out() || !args[given].isTensor()) continue;
      const Tensor want = (*shapes)[r].toTensor(), have = args[given].toTensor();
      if (have.sizes() == want.sizes()) continue;
      resize_(have, want.sym_sizes(), std::nullopt);
      prepared->views[given][0] = View(have);
    }
  }
  const int left = name == "aten::mm" ? 0 : name == "aten::addmm" ? 1 : -1;
  auto run = [op, prepared, left, args_shapes = std::make_shared<Args>()](const Args& given) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto host = filled(*prepared, given, false);
    torch::jit::Stack s(std::make_move_iterator(host.begin()), std::make_move_iterator(host.end()));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
    if (left >= 0) spoil(s[0].toTensor(), prepared->views[size_t(left)][0].sizes[1]);
    return Args(s.begin(), s.end());
  };
  auto fresh = [&](const Tensor& like) {
    if (!like.defined()) return Tensor();
    return empty_strided(c10::SymIntArrayRef(like.sym_sizes()), c10::SymIntArrayRef(like.sym_strides()), like.scalar_type(), std::nullopt, *dev, std::nullopt);
  };
  const bool can_queue = tensors_only && (shapes || (!any_new && !out_variant));
  Args results(returns.size());
  if (can_queue) {
    ++kernels_async;
    std::vector<std::vector<View>> landings(returns.size());
    for (size_t r = 0; r < returns.size(); ++r) {
      if (from[r] >= 0) {
        results[r] = args[size_t(from[r])];
      } else {
        results[r] = each((*shapes)[r], fresh);
        each(results[r], [&](const Tensor& t) { landings[r].emplace_back(t); return t; });
      }
    }
    // what is kept must not keep the card's memory: only numbers of tensors in lists
    auto bare = std::make_shared<Args>();
    for (auto& v : args) bare->push_back(each(v, [](const Tensor&) { return Tensor(); }));
    for (size_t i = 0; i < n; ++i)  // an undefined optional in a list must stay absent
      if (args[i].isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& t : args[i].toOptionalTensorVector()) list.push_back(t && t->defined() ? std::make_optional(at::empty({0})) : std::nullopt);
        (*bare)[i] = list;
      }
    q.push([run, bare, landings, from, full] {
      auto got = run(*bare);
      at::AutoDispatchBelowADInplaceOrView below;
      for (size_t r = 0; r < landings.size(); ++r) {
        if (from[r] >= 0) continue;
        size_t k = 0;
        each(got[r], [&](const Tensor& t) {
          const View& to = landings[r].at(k++);
          if (t.defined() && to.defined) {
            TORCH_CHECK(t.sizes() == c10::IntArrayRef(to.sizes) && t.scalar_type() == to.dtype, full, ": the shape told by meta is wrong");
            to.tensor().copy_(t);
          }
          return t;
        });
      }
    });
  } else {
    ++kernels_sync;
    tell(2, dev->index());
    q.wait();
    raise_error();
    auto got = run(args);
    for (size_t r = 0; r < returns.size(); ++r) {
      if (from[r] >= 0) {
        results[r] = args[size_t(from[r])];
        if (results[r].isTensor() && got[r].isTensor() && results[r].toTensor().sizes() != got[r].toTensor().sizes()) {
          Tensor have = results[r].toTensor();
          resize_(have, got[r].toTensor().sym_sizes(), std::nullopt);
          q.wait();
          View(have).tensor().copy_(got[r].toTensor());
        }
        continue;
      }
      results[r] = each(got[r], [&](const Tensor& t) {
        Tensor out = fresh(t);
        if (t.defined()) {
          q.wait();  // overwriting of fresh memory
          View(out).tensor().copy_(t);
        }
        return out;
      });
    }
  }
  if (counting) {
    int64_t bytes = 0;
    auto add = [&](const c10::IValue& v) {
      each(v, [&](const Tensor& t) {
        if (t.defined()) bytes += int64_t(t.nbytes());
        return t;
      });
    };
    for (const auto& v : args) add(v);
    for (size_t r = 0; r < results.size(); ++r)
      if (from[r] < 0) add(results[r]);  // the others are arguments
    note_operator(full, bytes);
  }
  for (auto& r : results) stack->push_back(std::move(r));
}

// ---- matrix products by AMD's libraries, where they are loaded: as torch's build for ROCm asks for them --------------------
using Multiply = int (*)(const gfx_product*, char*, size_t);
std::atomic<Multiply> multiply{nullptr};
std::atomic<int> preferred{-1};  // by torch.backends.cuda.preferred_blas_library; -1: not said
bool prefers_hipblaslt() {  // else torch's own variable; rocBLAS by default on this card
  if (preferred.load() >= 0) return preferred.load();
  const char* wish = std::getenv("TORCH_BLAS_PREFER_HIPBLASLT");
  return wish && std::string(wish) == "1";
}
struct Matrix {  // by columns, or by rows: across
  Tensor held;
  bool across;
  int64_t leading, stride;
};
Matrix matrix(const Tensor& t) {
  const int64_t rows = t.size(-2), columns = t.size(-1), down = t.stride(-2), right = t.stride(-1);
  const int64_t stride = t.dim() == 3 ? t.stride(0) : 0;
  if (right == 1 && down >= std::max<int64_t>(1, columns)) return {t, true, down, stride};
  if (down == 1 && right >= std::max<int64_t>(1, rows)) return {t, false, right, stride};
  const Tensor copy = t.contiguous();
  return {copy, true, std::max<int64_t>(1, columns), rows * columns};
}
int type_of(const Tensor& t) {
  return t.scalar_type() == at::kFloat ? GFX_F32 : t.scalar_type() == at::kHalf ? GFX_F16 : t.scalar_type() == at::kBFloat16 ? GFX_BF16 : -1;
}
// out = beta * self + alpha * a b; false where these libraries are not asked.
bool multiplied(Tensor out, const Tensor& self, const Tensor& a, const Tensor& b, double beta, double alpha) {
  const auto by = multiply.load();
  if (!by || a.dim() != b.dim() || (a.dim() != 2 && a.dim() != 3) || a.device() != b.device() || out.device() != a.device()) return false;
  if (type_of(a) < 0 || a.scalar_type() != b.scalar_type() || (out.scalar_type() != a.scalar_type() && out.scalar_type() != at::kFloat)) return false;
  if (a.size(-1) != b.size(-2) || a.size(0) == 0 || a.numel() == 0 || b.numel() == 0 || (a.dim() == 3 && a.size(0) != b.size(0))) return false;
  const int64_t rows = a.size(-2), columns = b.size(-1);
  c10::DeviceGuard guard(a.device());
  const Tensor target = out.is_contiguous() && !out.is_alias_of(a) && !out.is_alias_of(b) ? out : at::empty(out.sizes(), out.options());
  // A bias of one row goes into hipBLASLt's epilogue, but in float32: its kernels for that are of 64 lanes a wave.
  const bool bias = self.defined() && self.dim() == 1 && a.dim() == 2 && beta == 1 && self.size(0) == columns && self.is_contiguous() && columns > 1 && rows > 1 &&
                    self.scalar_type() == a.scalar_type() && out.scalar_type() == a.scalar_type() && type_of(a) != GFX_F32;
  if (self.defined() && beta != 0 && !bias && !self.is_same(target)) target.copy_(self.expand(target.sizes()));
  const Matrix left = matrix(b), right = matrix(a);  // the product by columns is that of the transposed
  gfx_product p{};
  p.a = left.held.data_ptr(), p.b = right.held.data_ptr(), p.c = p.d = target.data_ptr();
  p.across_a = !left.across, p.across_b = !right.across;
  p.m = columns, p.n = rows, p.k = a.size(-1), p.batches = a.dim() == 3 ? a.size(0) : 1;
  p.lda = left.leading, p.ldb = right.leading, p.ldc = p.ldd = std::max<int64_t>(1, columns);
  p.stride_a = left.stride, p.stride_b = right.stride, p.stride_c = p.stride_d = rows * columns;
  p.alpha = float(alpha), p.beta = self.defined() && !bias ? float(beta) : 0.0f;
  p.type_in = type_of(a), p.type_out = type_of(out);
  p.library = bias || (prefers_hipblaslt() && type_of(a) != GFX_F32) ? GFX_HIPBLASLT : GFX_ROCBLAS;
  p.bias = bias ? self.data_ptr() : nullptr;
  const auto stream = current_stream[a.device().index()];
  p.stream = stream ? &queue(a.device().index(), stream) : nullptr;
  char error[1000] = "";
  TORCH_CHECK(!by(&p, error, sizeof error), "CUDA error: ", error);
  if (!target.is_same(out)) out.copy_(target);
  return true;
}
void product(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const bool in_place = schema.name().back() == '_', out_variant = schema.arguments().back().is_out();
  const bool adds = schema.name().find("add") != std::string::npos;
  if (!multiply.load()) return fallback(op, stack);
  const Args args(stack->end() - int64_t(n), stack->end());
  const Tensor self = adds ? args[0].toTensor() : Tensor(), a = args[adds].toTensor(), b = args[adds + 1].toTensor();
  const double beta = adds ? args[3].toScalar().toDouble() : 0, alpha = adds ? args[4].toScalar().toDouble() : 1;
  if (a.dim() < 2 || b.dim() < 2 || a.device().type() != kSim) return fallback(op, stack);
  std::vector<int64_t> shape = a.sizes().vec();
  shape.back() = b.size(-1);
  Tensor out = out_variant ? args.back().toTensor() : in_place ? self : at::empty(shape, a.options());
  if (out.sizes() != c10::IntArrayRef(shape)) {
    if (!out_variant) return fallback(op, stack);
    resize_(out, c10::fromIntArrayRefSlow(shape), std::nullopt);
  }
  if (!multiplied(out, self, a, b, beta, alpha)) return fallback(op, stack);
  torch::jit::drop(*stack, n);
  stack->push_back(out);
}
Tensor mm_to(const Tensor& a, const Tensor& b, at::ScalarType to) {
  if (multiply.load() && a.dim() == 2 && b.dim() == 2) {
    Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(to));
    if (multiplied(out, Tensor(), a, b, 0, 1)) return out;
  }
  return at::mm(a.to(to), b.to(to));  // the CPU has no such
}
Tensor& mm_to_out(const Tensor& a, const Tensor& b, at::ScalarType to, Tensor& out) {
  return multiplied(out, Tensor(), a, b, 0, 1) ? out : at::mm_out(out, a.to(to), b.to(to));
}
Tensor addmm_to(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType to, const at::Scalar& beta, const at::Scalar& alpha) {
  if (multiply.load() && a.dim() == 2 && b.dim() == 2) {
    Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(to));
    if (multiplied(out, self, a, b, beta.toDouble(), alpha.toDouble())) return out;
  }
  return at::addmm(self, a.to(to), b.to(to), beta, alpha);
}
Tensor& addmm_to_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType to, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return multiplied(out, self, a, b, beta.toDouble(), alpha.toDouble()) ? out : at::addmm_out(out, self, a.to(to), b.to(to), beta, alpha);
}
} // namespace sim

namespace c10d {
namespace {
class CardTimer final : public Timer {  // DistributedDataParallel measures some of its steps, and asserts that it can
 public:
  explicit CardTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to && *to >= *from ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, sim::kSim, CardTimer)
} // namespace
} // namespace c10d

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  // Kernels of their own, as a card has them: else torch takes them apart into a batch norm.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  // Losses whose out variants give the result two shapes one after the other.
  for (const char* name : {"mse_loss", "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
  for (const char* name : {"mm", "mm.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "baddbmm", "baddbmm.out", "baddbmm_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::product>());
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("copy_", sim::copy_);
  m.impl("resize_", sim::resize_);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("unfold", sim::unfold);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage);
  m.impl("set_.source_Storage", sim::set_whole);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_", sim::set_nothing);
  m.impl("record_stream", sim::record_stream);
  m.impl("_local_scalar_dense", sim::local_scalar);
  m.impl("_fused_sdp_choice", sim::sdp_choice);
  m.impl("native_dropout", sim::native_dropout);
  m.impl("mm.dtype", sim::mm_to);
  m.impl("histc", sim::histc);
  m.impl("mm.dtype_out", sim::mm_to_out);
  m.impl("addmm.dtype", sim::addmm_to);
  m.impl("addmm.dtype_out", sim::addmm_to_out);
}

extern "C" {
__attribute__((visibility("default"))) void sim_sleep(int us) {  // on the current stream, as torch.cuda._sleep
  sim::queue(sim::stream_of(sim::current_device)).push([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}
__attribute__((visibility("default"))) void sim_resize(void* storage, size_t n) {  // what was there is not kept
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  c10::DeviceGuard guard(impl->device());
  impl->set_data_ptr(sim::allocator()->allocate(n));
  impl->set_nbytes(n);
}
__attribute__((visibility("default"))) void sim_delay(int compute_low, int compute_high, int copy_low, int copy_high) {
  sim::compute_delay.low = compute_low; sim::compute_delay.high = compute_high;
  sim::copy_delay.low = copy_low; sim::copy_delay.high = copy_high;
}
__attribute__((visibility("default"))) void sim_products(sim::Multiply by) { sim::multiply = by; }
__attribute__((visibility("default"))) void sim_prefer_hipblaslt(int wish) { sim::preferred = wish; }
__attribute__((visibility("default"))) void sim_seed(uint64_t s) { sim::seed = s; }
__attribute__((visibility("default"))) void sim_rng_seed(int dev, uint64_t s) {
  auto g = sim::default_generator(c10::DeviceIndex(dev));
  g.set_current_seed(s);
}
__attribute__((visibility("default"))) uint64_t sim_rng_initial_seed(int dev) { return sim::default_generator(c10::DeviceIndex(dev)).current_seed(); }
__attribute__((visibility("default"))) int sim_rng_get(int dev, void* out, int room) {
  at::Tensor state = sim::default_generator(c10::DeviceIndex(dev)).get_state();
  const int n = int(state.nbytes());
  if (n <= room) std::memcpy(out, state.data_ptr(), size_t(n));
  return n;
}
__attribute__((visibility("default"))) void sim_rng_set(int dev, const void* bytes, int n) {
  at::Tensor state = at::empty({n}, at::kByte);
  std::memcpy(state.data_ptr(), bytes, size_t(n));
  auto g = sim::default_generator(c10::DeviceIndex(dev));
  g.set_state(state);
}
__attribute__((visibility("default"))) void sim_hook(sim::Hook hook) { sim::hook = hook; }
__attribute__((visibility("default"))) void sim_harm(int down, int kind, double rate, int64_t smallest) {
  auto& harm = sim::harms[down];
  harm.kind = kind; harm.rate = rate; harm.smallest = smallest;
}
__attribute__((visibility("default"))) void sim_wrong(double rate, uint64_t seed) {
  sim::wrong_rate = rate;
  sim::wrong_rng.seed(seed);
}
__attribute__((visibility("default"))) void sim_devices(int n) { sim::cards = n; }
__attribute__((visibility("default"))) int sim_device_count() { return sim::visible(); }
__attribute__((visibility("default"))) int sim_blocks(int dev, int64_t* rows, int room) {  // address, size, stream, state
  auto& mem = sim::memory(sim::DeviceIndex(dev));
  std::lock_guard<std::mutex> g(mem.m);
  int n = 0;
  for (auto& [_, b] : mem.all) {
    if (n < room) {
      const int64_t row[4] = {int64_t(b->ptr), int64_t(b->size), b->stream, b->state};
      std::memcpy(rows + 4 * n, row, sizeof row);
    }
    ++n;
  }
  return n;
}
// For kernels that are executed from machine code: streams by their handle, the null stream being the current card's.
static sim::Queue& queue_of(void* stream) { return stream ? *static_cast<sim::Queue*>(stream) : sim::queue(sim::current_device, 0); }
__attribute__((visibility("default"))) void* sim_stream(int dev) {
  const auto id = sim::current_stream[dev];
  return id ? &sim::queue(sim::DeviceIndex(dev), id) : nullptr;
}
__attribute__((visibility("default"))) int sim_stream_device(void* stream) { return queue_of(stream).dev; }
__attribute__((visibility("default"))) void sim_push(void* stream, void (*run)(void*), void* context) {
  ++sim::kernels_async;
  queue_of(stream).push([run, context] { run(context); });
}
__attribute__((visibility("default"))) int sim_current_device() { return sim::current_device; }
__attribute__((visibility("default"))) void sim_use_device(int dev) { sim::current_device = sim::DeviceIndex(dev); }
__attribute__((visibility("default"))) void sim_wait(void* stream, int dev) {  // for a stream, or with `dev` for all of a card's
  if (dev < 0) return queue_of(stream).wait();
  for (sim::StreamId id = 0; id < sim::kStreams; ++id) sim::queue(sim::DeviceIndex(dev), id).wait();
}
__attribute__((visibility("default"))) int sim_live(int dev, uint64_t (*rows)[3], int room) {  // address, bytes that were asked for, and with the allocator's rounding
  int n = 0;
  auto add = [&](const void* at, size_t bytes, size_t rounded) {
    if (n < room) rows[n][0] = uint64_t(at), rows[n][1] = bytes, rows[n][2] = rounded;
    ++n;
  };
  auto& mem = sim::memory(sim::DeviceIndex(dev));
  {
    std::lock_guard<std::mutex> g(mem.m);
    for (auto& [at, b] : mem.all)
      if (b->state == 1) add(at, b->asked, b->used);
  }
  std::lock_guard<std::mutex> g(sim::pinned_lock);
  for (auto& [at, bytes] : sim::pinned()) add(at, bytes, bytes);
  return n;
}
__attribute__((visibility("default"))) void sim_poison(int on) { sim::poison = on != 0; }
__attribute__((visibility("default"))) void sim_capacity(int64_t bytes) { sim::capacity = bytes; }
__attribute__((visibility("default"))) void sim_refusal(int how, int64_t library) { sim::refusal = how; sim::library = library; }
__attribute__((visibility("default"))) void sim_occupied(int64_t bytes) {
  for (int dev = 0; dev < sim::kDevices; ++dev) sim::memory(sim::DeviceIndex(dev)).outside = bytes;
}
__attribute__((visibility("default"))) int cudaPeekAtLastError() {  // of the runtime, for whoever looks it up
  return sim::memory(0).ooms + sim::memory(1).ooms ? 2 : 0;
}
__attribute__((visibility("default"))) int64_t sim_count(int which) {
  switch (which) {
    case 0: return sim::kernels_async;
    case 1: return sim::kernels_sync;
    case 2: return sim::copies_async;
    case 3: return sim::copies_sync;
    case 4: return sim::memory(0).reused;
    case 5: return sim::memory(0).fresh;
    case 6: return sim::to_card;
    case 7: return sim::to_host;
    case 8: return sim::waits;
    default: return sim::harmed;
  }
}
__attribute__((visibility("default"))) void sim_count_operators(int on) { sim::counting = on != 0; }
__attribute__((visibility("default"))) int sim_operators(char* out, int room) {  // a line each: name, calls, bytes
  std::lock_guard<std::mutex> g(sim::operators_lock);
  std::string all;
  for (auto& [name, row] : sim::operators()) all += name + "\t" + std::to_string(row[0]) + "\t" + std::to_string(row[1]) + "\n";
  std::strncpy(out, all.c_str(), size_t(room) - 1);
  return int(all.size());
}
__attribute__((visibility("default"))) int sim_sync_ops(char* out, int room) {
  std::lock_guard<std::mutex> g(sim::no_meta_lock);
  std::string all;
  for (auto& s : sim::no_meta) all += s + "\n";
  std::strncpy(out, all.c_str(), size_t(room) - 1);
  return int(all.size());
}
}
