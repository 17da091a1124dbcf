// The Python face of the core: conversions, bounds and the interpreter's lock; nothing else.
//
// Calls that may take long (pre-faulting, filling, waiting, large lookups) release the interpreter's lock. Calls of
// `Index` and lookups of ordinary size keep it: they take microseconds, while getting the lock back from a busy thread
// can take its whole switch interval (measured beside one: a lookup of 72 us then takes 12 ms once in a hundred times).
// Keeping it also makes `Index` safe against a second thread that asks for `stats`.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <variant>

#include "arena.h"
#include "checksum.h"
#include "copy.h"
#include "cuda/copier.h"
#include "digest.h"
#include "expansion.h"
#include "index.h"
#include "io.h"
#include "replay.h"
#include "slabs.h"
#include "table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvstore {
namespace {

constexpr std::size_t LOOKUP_KEYS_UNDER_LOCK = 8192;

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using NumpyArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using RefList = std::vector<std::tuple<std::uint32_t, std::uint64_t>>;
using CommitList = std::vector<std::tuple<std::uint32_t, std::uint64_t, nb::bytes, nb::bytes, nb::bytes>>;

Bytes bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size()};
}

Id id_of(const nb::bytes& bytes, const char* what) {
    if (bytes.size() != 16) {
        throw std::invalid_argument(std::string(what) + " of " + std::to_string(bytes.size()) +
                                    " bytes: 16 are needed");
    }
    Id id;
    std::memcpy(id.data(), bytes.c_str(), id.size());
    return id;
}

void check_key(Bytes key) {
    if (key.size() >= KEY_BYTES_MIN && key.size() <= KEY_BYTES_MAX) return;
    throw std::invalid_argument("a key of " + std::to_string(key.size()) + " bytes: " + std::to_string(KEY_BYTES_MIN) +
                                " to " + std::to_string(KEY_BYTES_MAX) + " are possible");
}

// The keys of a Python sequence, which stays alive, with its items, for as long as this does.
class Keys {
  public:
    explicit Keys(nb::handle sequence) : items_(nb::steal(PySequence_Fast(sequence.ptr(), "keys are a sequence"))) {
        if (!items_.is_valid()) throw nb::python_error();
        const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items_.ptr()));
        PyObject** items = PySequence_Fast_ITEMS(items_.ptr());
        keys_.reserve(count);
        for (std::size_t i = 0; i < count; ++i) {
            char* begin;
            Py_ssize_t nbytes;
            if (PyBytes_AsStringAndSize(items[i], &begin, &nbytes) != 0) throw nb::python_error();
            keys_.emplace_back(reinterpret_cast<const std::byte*>(begin), static_cast<std::size_t>(nbytes));
            check_key(keys_.back());
        }
    }
    // From here on the keys are our own: another thread may change the sequence.
    void detach() {
        copies_.resize(keys_.size());
        for (std::size_t i = 0; i < keys_.size(); ++i) {
            std::memcpy(copies_[i].data(), keys_[i].data(), keys_[i].size());
            keys_[i] = Bytes(copies_[i].data(), keys_[i].size());
        }
    }
    std::span<const Bytes> get() const { return keys_; }

  private:
    nb::object items_;
    std::vector<Bytes> keys_;
    std::vector<std::array<std::byte, KEY_BYTES_MAX>> copies_;
};

nb::bytes bytes_from(Bytes bytes) {
    return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Selection selection(const std::optional<nb::bytes>& name_space, const std::optional<nb::bytes>& tenant) {
    Selection what;
    if (name_space) what.name_space = id_of(*name_space, "a namespace");
    if (tenant) what.tenant = id_of(*tenant, "a tenant");
    return what;
}

std::vector<Ref> refs_of(const RefList& list) {
    std::vector<Ref> refs;
    refs.reserve(list.size());
    for (const auto& [slot, generation] : list) refs.push_back({slot, generation});
    return refs;
}

nb::list bools(const std::vector<bool>& values) {
    nb::list list;
    for (const bool value : values) list.append(nb::bool_(value));
    return list;
}

template <typename T>
NumpyArray<T> numpy_of(std::unique_ptr<T[]> values, std::size_t count) {
    T* data = values.release();
    nb::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
    return NumpyArray<T>(data, {count}, owner);
}

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
    return {array.data(), array.shape(0)};
}

std::size_t check_equal(std::size_t one, std::size_t other, const char* what) {
    if (one != other) {
        throw std::invalid_argument(std::string(what) + " differ in length: " + std::to_string(one) + " and " +
                                    std::to_string(other));
    }
    return one;
}

// Memory of Python objects, theirs and in its place for as long as this lives.
class Buffers {
  public:
    Buffers(const nb::list& objects, std::uint64_t nbytes, bool writable) {
        held_.reserve(objects.size());
        for (nb::handle object : objects) {
            Py_buffer view;
            const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;  // both: contiguous
            if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) {
                release();
                throw nb::python_error();
            }
            held_.push_back(view);
            if (static_cast<std::uint64_t>(view.len) != nbytes) {
                const std::string found = std::to_string(view.len);
                release();
                throw std::invalid_argument("a buffer of " + found + " bytes, not " + std::to_string(nbytes));
            }
        }
    }
    ~Buffers() { release(); }
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;

    NumpyArray<std::uint64_t> addresses(const nb::list& positions) const {
        auto addresses = std::make_unique<std::uint64_t[]>(positions.size());
        for (std::size_t i = 0; i < positions.size(); ++i) {
            addresses[i] = reinterpret_cast<std::uint64_t>(held_.at(nb::cast<std::size_t>(positions[i])).buf);
        }
        return numpy_of(std::move(addresses), positions.size());
    }

  private:
    void release() {
        for (Py_buffer& view : held_) PyBuffer_Release(&view);
        held_.clear();
    }

    std::vector<Py_buffer> held_;
};

NumpyArray<std::uint64_t> slot_addresses(std::uint64_t arena, const nb::list& slots, std::uint64_t class_bytes,
                                         std::uint64_t unit_bytes) {
    auto addresses = std::make_unique<std::uint64_t[]>(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        addresses[i] = arena + slot_offset(nb::cast<std::uint32_t>(slots[i]), class_bytes, unit_bytes);
    }
    return numpy_of(std::move(addresses), slots.size());
}

// One row a piece, its fields in the order of `Piece`.
using PieceArray = nb::ndarray<const std::uint64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(Piece) == 5 * sizeof(std::uint64_t));

nb::tuple expanded(const PieceArray& pieces, std::size_t together, const Array<std::int64_t>& block_ids,
                   std::int64_t block_count, std::size_t first, std::size_t blocks_per_chunk,
                   const Array<std::uint64_t>& chunks, const std::optional<Array<bool>>& wanted) {
    const std::size_t blocks = block_ids.shape(0);
    if (together == 0 || blocks_per_chunk == 0 || pieces.shape(0) % together != 0) {
        throw std::invalid_argument(std::to_string(pieces.shape(0)) + " pieces, " + std::to_string(together) +
                                    " together, in chunks of " + std::to_string(blocks_per_chunk) + " blocks");
    }
    if (blocks == 0 || (first + blocks - 1) / blocks_per_chunk + 1 != chunks.shape(0)) {
        throw std::invalid_argument(std::to_string(blocks) + " blocks from block " + std::to_string(first) + " on, " +
                                    std::to_string(blocks_per_chunk) + " a chunk, do not touch " +
                                    std::to_string(chunks.shape(0)) + " chunks");
    }
    if (wanted) check_equal(blocks, wanted->shape(0), "blocks and which of them are wanted");
    std::vector<BlockPlace> places;
    places.reserve(blocks);
    for (std::size_t i = 0; i < blocks; ++i) {
        if (wanted && !wanted->data()[i]) continue;
        const std::int64_t id = block_ids.data()[i];
        if (id < 0 || id >= block_count) {
            throw std::invalid_argument("block " + std::to_string(id) + ", but the cache has " +
                                        std::to_string(block_count));
        }
        places.push_back({static_cast<std::uint64_t>(id), chunks.data()[(first + i) / blocks_per_chunk],
                          (first + i) % blocks_per_chunk});
    }
    const std::size_t room = pieces.shape(0) * places.size();
    std::unique_ptr<std::uint64_t[]> device(new std::uint64_t[room]), arena(new std::uint64_t[room]),
        nbytes(new std::uint64_t[room]);
    const std::size_t count = expand({reinterpret_cast<const Piece*>(pieces.data()), pieces.shape(0)}, together, places,
                                     {device.get(), arena.get(), nbytes.get()});
    return nb::make_tuple(numpy_of(std::move(device), count), numpy_of(std::move(arena), count),
                          numpy_of(std::move(nbytes), count));
}

// ---- Table ----

// Whose it is and how it is laid out is known after `close` too; what changes is read from the map while there is one.
// A closed table is one in which nothing is found, by a daemon that has not run for ever: another thread may close it
// between two reads of a scheduler, which then goes on without the store. No read outlives the map: each holds it.
struct PyTable {
    PyTable(int fd, const nb::bytes& key)
        : index_key(id_of(key, "an index key")),
          mapped(new MappedTable(fd)),
          instance_id(mapped->reader.instance_id()),
          shape(mapped->reader.shape()) {}
    std::shared_ptr<const MappedTable> held() const {
        if (!mapped) throw std::invalid_argument("the table is closed");
        return mapped;
    }
    std::uint64_t ready_bytes() const { return mapped ? mapped->reader.ready_bytes() : 0; }
    double heartbeat_age_ms() const {
        if (!mapped) return std::numeric_limits<double>::infinity();
        const std::uint64_t beat = mapped->reader.heartbeat_ns();
        const std::uint64_t now = monotonic_ns();
        return now > beat ? static_cast<double>(now - beat) / 1e6 : 0.0;
    }
    std::uint64_t premap(std::uint64_t first, std::uint64_t nbytes) const {
        const auto table = mapped;
        const std::uint64_t end = shape.generations_offset();  // behind it daemon and kernel keep no memory yet
        if (!table || first >= end) return 0;
        nb::gil_scoped_release unlocked;
        const std::uint64_t piece = std::min(nbytes, end - first);
        populate_for_reading(reinterpret_cast<std::uintptr_t>(table->memory.data()) + first, piece);
        return piece;
    }
    nb::tuple lookup(const nb::bytes& name_space, const nb::bytes& tenant, nb::handle sequence) const {
        const auto table = mapped;
        const Hasher hasher = hasher_for(index_key, id_of(name_space, "a namespace"), id_of(tenant, "a tenant"));
        Keys keys(sequence);
        const std::size_t count = keys.get().size();
        std::vector<Found> found(count);
        if (table && count > LOOKUP_KEYS_UNDER_LOCK) {
            keys.detach();
            nb::gil_scoped_release unlocked;
            table->reader.find_all(hasher, keys.get(), found);
        } else if (table) {
            table->reader.find_all(hasher, keys.get(), found);
        }
        std::string codes(count, '\0');
        auto slots = std::make_unique<std::uint32_t[]>(count);
        auto generations = std::make_unique<std::uint64_t[]>(count);
        for (std::size_t i = 0; i < count; ++i) {
            codes[i] = static_cast<char>(found[i].where);
            slots[i] = found[i].at.slot;
            generations[i] = found[i].at.generation;
        }
        return nb::make_tuple(nb::bytes(codes.data(), count), numpy_of(std::move(slots), count),
                              numpy_of(std::move(generations), count));
    }
    bool wait_shown(const nb::bytes& name_space, const nb::bytes& tenant, const nb::bytes& key, std::uint32_t slot,
                    std::uint64_t generation, double timeout_s) const {
        const auto table = mapped;
        check_key(bytes_of(key));
        const Hasher hasher = hasher_for(index_key, id_of(name_space, "a namespace"), id_of(tenant, "a tenant"));
        const Digest digest = hasher(bytes_of(key));
        nb::gil_scoped_release unlocked;
        return table && table->reader.wait_shown(digest, {slot, generation}, timeout_s);
    }
    nb::bytes current(const Array<std::uint32_t>& slots, const Array<std::uint64_t>& generations) const {
        const std::size_t count = check_equal(slots.shape(0), generations.shape(0), "slots and generations");
        std::vector<std::uint8_t> answers(count);
        if (mapped) mapped->reader.current(span_of(slots), span_of(generations), answers);
        return nb::bytes(reinterpret_cast<const char*>(answers.data()), count);
    }

    Id index_key;
    std::shared_ptr<const MappedTable> mapped;
    Id instance_id;
    TableShape shape;
};

// ---- Arena ----

struct PyArena {
    PyArena(int fd, std::size_t nbytes) : size(nbytes), mapped(new Mapping(fd, nbytes, Mapping::Access::WRITE)) {}
    const std::shared_ptr<Mapping>& held() const {
        if (!mapped) throw std::invalid_argument("the arena is closed");
        return mapped;
    }
    void close() {
        if (views > 0) {
            PyErr_Format(PyExc_BufferError, "the arena has %zu views that are in use: release them first", views);
            throw nb::python_error();
        }
        mapped.reset();
    }
    static int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
        auto* arena = nb::inst_ptr<PyArena>(self);
        if (!arena->mapped) {
            PyErr_SetString(PyExc_BufferError, "the arena is closed");
            buffer->obj = nullptr;
            return -1;
        }
        const int result =
            PyBuffer_FillInfo(buffer, self, arena->mapped->data(), static_cast<Py_ssize_t>(arena->size), 0, flags);
        if (result == 0) ++arena->views;
        return result;
    }
    static void release_buffer(PyObject* self, Py_buffer*) { --nb::inst_ptr<PyArena>(self)->views; }

    std::size_t size;
    std::size_t views = 0;
    std::shared_ptr<Mapping> mapped;
};

PyType_Slot arena_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(PyArena::get_buffer)},
                             {Py_bf_releasebuffer, reinterpret_cast<void*>(PyArena::release_buffer)},
                             {0, nullptr}};

// ---- Copier ----

std::vector<Fragment> fragments_of(const Array<std::uint64_t>& sources, const Array<std::uint64_t>& destinations,
                                   const Array<std::uint64_t>& sizes) {
    const std::size_t count = check_equal(sources.shape(0), destinations.shape(0), "sources and destinations");
    check_equal(count, sizes.shape(0), "sources and sizes");
    std::vector<Fragment> fragments(count);
    for (std::size_t i = 0; i < count; ++i) {
        fragments[i] = {sources.data()[i], destinations.data()[i], sizes.data()[i]};
    }
    return fragments;
}

std::vector<Fragment> fragments_of(const Array<std::uint64_t>& sources, const Array<std::uint64_t>& destinations,
                                   std::uint64_t nbytes) {
    const std::size_t count = check_equal(sources.shape(0), destinations.shape(0), "sources and destinations");
    std::vector<Fragment> fragments(count);
    for (std::size_t i = 0; i < count; ++i) fragments[i] = {sources.data()[i], destinations.data()[i], nbytes};
    return fragments;
}

Expected expected_of(const PyTable* table, const std::optional<Array<std::uint32_t>>& slots,
                     const std::optional<Array<std::uint64_t>>& generations) {
    if ((table != nullptr) != slots.has_value() || slots.has_value() != generations.has_value()) {
        throw std::invalid_argument("table, slots and generations belong together: give all three or none");
    }
    if (table == nullptr) return {};
    const auto slot_span = span_of(*slots);
    const auto generation_span = span_of(*generations);
    return {table->held(), {slot_span.begin(), slot_span.end()}, {generation_span.begin(), generation_span.end()}};
}

struct PyCopier {
    explicit PyCopier(std::size_t threads) : copier(Copier::with_threads(threads)) {}
    void remove_region(std::uint64_t address) {
        nb::gil_scoped_release unlocked;
        copier->remove_region(address);
    }
    // All of them or none.
    void add_regions(const Array<std::uint64_t>& addresses, std::uint64_t nbytes) {
        const auto all = span_of(addresses);
        std::size_t added = 0;
        try {
            for (; added < all.size(); ++added) copier->add_region(all[added], nbytes);
        } catch (...) {
            nb::gil_scoped_release unlocked;
            for (const std::uint64_t address : all.first(added)) copier->remove_region(address);
            throw;
        }
    }
    void remove_regions(const Array<std::uint64_t>& addresses) {
        nb::gil_scoped_release unlocked;
        for (const std::uint64_t address : span_of(addresses)) copier->remove_region(address);
    }
    void submit(std::uint64_t job, const Array<std::uint64_t>& sources, const Array<std::uint64_t>& destinations,
                const std::variant<std::uint64_t, Array<std::uint64_t>>& sizes, const PyTable* table,
                const std::optional<Array<std::uint32_t>>& slots,
                const std::optional<Array<std::uint64_t>>& generations) {
        std::vector<Fragment> fragments =
            std::visit([&](const auto& nbytes) { return fragments_of(sources, destinations, nbytes); }, sizes);
        Expected expected = expected_of(table, slots, generations);
        nb::gil_scoped_release unlocked;
        copier->submit(job, std::move(fragments), std::move(expected));
    }
    bool wait(nb::handle jobs, double timeout_s) {
        std::vector<std::uint64_t> numbers;
        for (nb::handle job : jobs) numbers.push_back(nb::cast<std::uint64_t>(job));
        nb::gil_scoped_release unlocked;
        return copier->wait(numbers, timeout_s);
    }
    void close() {
        nb::gil_scoped_release unlocked;
        copier->close();
    }

    std::shared_ptr<Copier> copier;
};

// ---- DeviceCopier ----

struct PyDeviceCopier {
    PyDeviceCopier(int device, const std::string& library, const nb::bytes& kernels,
                   const cuda::CopySettings& settings) {
        auto driver = cuda::Driver::open(library);
        copier = cuda::DeviceCopier::open(
            std::make_unique<cuda::OpenDevice>(std::move(driver), device, bytes_of(kernels)), settings);
    }
    void map_arena(const PyArena& arena, const PyTable* table, bool pin) {
        copier->map_arena(arena.held(), table != nullptr ? table->held() : nullptr, pin);
    }
    const char* pin_next(std::uint64_t address) {
        const nb::gil_scoped_release unlocked;
        switch (copier->arena(address)->pin_next()) {
            case cuda::Pinned::PIECE:
                return "piece";
            case cuda::Pinned::NOTHING:
                return "nothing";
            case cuda::Pinned::ALL:
                return "all";
            case cuda::Pinned::STOPPED:
                break;
        }
        return "stopped";
    }
    void submit(std::uint64_t job, const Array<std::uint64_t>& sources, const Array<std::uint64_t>& destinations,
                const Array<std::uint64_t>& sizes, bool is_load, std::uintptr_t compute_stream,
                const Array<std::int64_t>& blocks, const PyTable* table,
                const std::optional<Array<std::uint32_t>>& slots,
                const std::optional<Array<std::uint64_t>>& generations) {
        const auto block_span = span_of(blocks);
        cuda::DeviceCopier::Submission work{job,
                                            is_load,
                                            fragments_of(sources, destinations, sizes),
                                            expected_of(table, slots, generations),
                                            reinterpret_cast<cuda::Stream>(compute_stream),
                                            {block_span.begin(), block_span.end()}};
        const nb::gil_scoped_release unlocked;
        copier->submit(std::move(work));
    }
    bool wait(nb::handle jobs, double timeout_s) {
        std::vector<std::uint64_t> numbers;
        for (nb::handle job : jobs) numbers.push_back(nb::cast<std::uint64_t>(job));
        const nb::gil_scoped_release unlocked;
        return copier->wait(numbers, timeout_s);
    }

    std::shared_ptr<cuda::DeviceCopier> copier;
};

void bind_cuda(nb::module_& m) {
    const auto kernels = cuda::built_kernels();
    m.attr("CUDA_KERNELS") = nb::bytes(kernels.data(), kernels.size());
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();

    nb::class_<PyDeviceCopier>(m, "DeviceCopier")
        .def(
            "__init__",
            [](PyDeviceCopier* self, int device, const std::string& library, const nb::bytes& kernels,
               std::uint64_t load_kernel_bytes, std::uint64_t store_kernel_bytes, std::size_t kernel_fragments_min,
               unsigned kernel_blocks, std::uint64_t in_flight_bytes, std::uint64_t pin_piece_bytes, bool background) {
                new (self) PyDeviceCopier(device, library, kernels,
                                          {load_kernel_bytes, store_kernel_bytes, kernel_fragments_min, kernel_blocks,
                                           in_flight_bytes, pin_piece_bytes, background});
            },
            "device"_a, nb::kw_only(), "library"_a = "libcuda.so.1",
            "kernels"_a = nb::bytes(kernels.data(), kernels.size()), "load_kernel_bytes"_a = 0,
            "store_kernel_bytes"_a = 0, "kernel_fragments_min"_a = cuda::CopySettings{}.kernel_fragments_min,
            "kernel_blocks"_a = cuda::CopySettings{}.kernel_blocks,
            "in_flight_bytes"_a = cuda::CopySettings{}.in_flight_bytes,
            "pin_piece_bytes"_a = cuda::CopySettings{}.pin_piece_bytes, "background"_a = true)
        .def_prop_ro("device_name", [](const PyDeviceCopier& self) { return self.copier->device().name(); })
        .def_prop_ro("capability", [](const PyDeviceCopier& self) { return self.copier->device().capability(); })
        .def_prop_ro("numa_node", [](const PyDeviceCopier& self) { return self.copier->device().numa_node(); })
        .def_prop_ro("driver_version",
                     [](const PyDeviceCopier& self) { return self.copier->device().driver().version; })
        .def_prop_ro("has_batch", [](const PyDeviceCopier& self) { return self.copier->device().driver().has_batch(); })
        .def_prop_ro("kernel_problem",
                     [](const PyDeviceCopier& self) { return self.copier->device().kernel_problem(); })
        .def_prop_ro("lost", [](const PyDeviceCopier& self) { return self.copier->lost(); })
        .def_prop_ro("counts",
                     [](const PyDeviceCopier& self) {
                         const auto counts = self.copier->counts();
                         return nb::make_tuple(counts.engine_bytes, counts.kernel_bytes, counts.pageable_bytes);
                     })
        .def(
            "add_memory",
            [](PyDeviceCopier& self, std::uint64_t address, std::uint64_t nbytes) {
                self.copier->add_memory(address, nbytes);
            },
            "address"_a, "nbytes"_a)
        .def(
            "add_host_memory",
            [](PyDeviceCopier& self, std::uint64_t address, std::uint64_t nbytes) {
                self.copier->add_host_memory(address, nbytes);
            },
            "address"_a, "nbytes"_a)
        .def(
            "allocate", [](PyDeviceCopier& self, std::uint64_t nbytes) { return self.copier->allocate(nbytes); },
            "nbytes"_a)
        .def("map_arena", &PyDeviceCopier::map_arena, "arena"_a, "table"_a.none(), nb::kw_only(), "pin"_a)
        .def("pin_next", &PyDeviceCopier::pin_next, "address"_a)
        .def(
            "stop_pinning",
            [](PyDeviceCopier& self, std::uint64_t address) { self.copier->arena(address)->stop_pinning(); },
            "address"_a)
        .def(
            "pinned_bytes",
            [](PyDeviceCopier& self, std::uint64_t address) { return self.copier->arena(address)->pinned_bytes(); },
            "address"_a)
        .def(
            "refusal",
            [](PyDeviceCopier& self, std::uint64_t address) { return self.copier->arena(address)->refusal(); },
            "address"_a)
        .def(
            "unmap_arena", [](PyDeviceCopier& self, std::uint64_t address) { self.copier->unmap_arena(address); },
            "address"_a, unlocked)
        .def(
            "suspend", [](PyDeviceCopier& self) { self.copier->suspend(); }, unlocked)
        .def("resume", [](PyDeviceCopier& self) { self.copier->resume(); })
        .def("submit", &PyDeviceCopier::submit, "job"_a, "sources"_a.noconvert(), "destinations"_a.noconvert(),
             "sizes"_a.noconvert(), nb::kw_only(), "is_load"_a, "compute_stream"_a, "blocks"_a.noconvert(),
             "table"_a = nb::none(), "slots"_a.noconvert() = nb::none(), "generations"_a.noconvert() = nb::none())
        .def(
            "advance", [](PyDeviceCopier& self) { return self.copier->advance(); }, unlocked)
        .def("finished", [](PyDeviceCopier& self) { return self.copier->finished(); })
        .def("wait", &PyDeviceCopier::wait, "jobs"_a, "timeout_s"_a)
        .def("close", [](PyDeviceCopier& self) { self.copier->close(); }, unlocked);
}

// ---- Index ----

struct PyIndex {
    PyIndex(int table_fd, std::uint64_t table_bytes, const PyArena* arena, std::uint64_t arena_bytes,
            std::uint64_t unit_bytes, const nb::bytes& index_key, const nb::bytes& instance_id,
            const std::string& eviction_policy, bool verify)
        : index(std::make_shared<Mapping>(table_fd, table_bytes, Mapping::Access::WRITE),
                arena != nullptr ? arena->held() : nullptr, arena != nullptr ? arena->size : arena_bytes, unit_bytes,
                id_of(index_key, "an index key"), id_of(instance_id, "an instance id"), rule_named(eviction_policy),
                verify) {}
    nb::list grant(std::uint64_t group, std::uint64_t chunk_bytes, std::size_t count) {
        nb::list granted;
        for (const Ref& ref : index.grant(group, chunk_bytes, count)) {
            granted.append(nb::make_tuple(ref.slot, ref.generation));
        }
        return granted;
    }
    nb::list commit(std::uint64_t group, const nb::bytes& name_space, const CommitList& list, std::uint64_t now_ms,
                    bool is_use) {
        std::vector<Commit> commits;
        commits.reserve(list.size());
        for (const auto& [slot, generation, tenant, key, parent] : list) {
            check_key(bytes_of(key));
            if (parent.size() > 0) check_key(bytes_of(parent));
            commits.push_back({{slot, generation}, id_of(tenant, "a tenant"), bytes_of(key), bytes_of(parent)});
        }
        nb::list codes;
        for (const CommitCode code : index.commit(group, id_of(name_space, "a namespace"), commits, now_ms, is_use)) {
            codes.append(static_cast<int>(code));
        }
        return codes;
    }
    nb::bytes lookup(const nb::bytes& name_space, const nb::bytes& tenant, nb::handle sequence) const {
        const Keys keys(sequence);
        const auto found = index.lookup(id_of(name_space, "a namespace"), id_of(tenant, "a tenant"), keys.get());
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
    }
    Removal begin_removal(const std::optional<nb::bytes>& name_space, const std::optional<nb::bytes>& tenant,
                          std::optional<std::uint64_t> used_before_ms, std::optional<std::uint64_t> nbytes,
                          bool dry_run) {
        Selection what = selection(name_space, tenant);
        what.used_before_ms = used_before_ms.value_or(UINT64_MAX);
        return index.begin_removal(what, nbytes.value_or(UINT64_MAX), dry_run);
    }
    nb::list usage(const std::optional<std::tuple<nb::bytes, nb::bytes>>& after, std::size_t limit) const {
        std::optional<Scope> scope;
        if (after) scope = {id_of(std::get<0>(*after), "a namespace"), id_of(std::get<1>(*after), "a tenant")};
        nb::list page;
        for (const Usage& usage : index.usage(scope, limit)) {
            page.append(nb::make_tuple(bytes_from(usage.scope.name_space), bytes_from(usage.scope.tenant), usage.chunks,
                                       usage.bytes, usage.in_lower));
        }
        return page;
    }
    nb::tuple chunks(std::uint32_t next, const std::optional<nb::bytes>& name_space,
                     const std::optional<nb::bytes>& tenant, std::size_t steps, std::size_t limit) const {
        nb::list page;
        for (const ChunkView& chunk : index.chunks(next, selection(name_space, tenant), steps, limit)) {
            page.append(nb::make_tuple(bytes_from(chunk.scope.name_space), bytes_from(chunk.scope.tenant),
                                       bytes_from(chunk.key), chunk.bytes, chunk.used_ms, nb::bool_(chunk.leased)));
        }
        return nb::make_tuple(page, next == NO_RECORD ? nb::object(nb::none()) : nb::object(nb::int_(next)));
    }
    nb::list next_to_go(std::uint64_t nbytes, std::size_t steps, std::size_t limit) const {
        return list_of(index.next_to_go(nbytes, steps, limit));
    }
    nb::tuple unwritten(std::uint32_t next, std::optional<std::uint64_t> used_before_ms, std::size_t steps,
                        std::size_t limit) const {
        const nb::list page = list_of(index.unwritten(next, used_before_ms.value_or(UINT64_MAX), steps, limit));
        return nb::make_tuple(page, next == NO_RECORD ? nb::object(nb::none()) : nb::object(nb::int_(next)));
    }
    nb::list used_often(const nb::bytes& name_space, const nb::bytes& tenant, nb::handle sequence,
                        std::uint32_t uses) const {
        const Keys keys(sequence);
        return list_of(index.used_often(id_of(name_space, "a namespace"), id_of(tenant, "a tenant"), keys.get(), uses));
    }
    static nb::list list_of(const std::vector<Unwritten>& chunks) {
        nb::list list;
        for (const Unwritten& chunk : chunks) {
            list.append(nb::make_tuple(bytes_from(chunk.scope.name_space), bytes_from(chunk.scope.tenant),
                                       bytes_from(chunk.key), chunk.at.slot, chunk.at.generation));
        }
        return list;
    }
    nb::list evictions_of(const nb::bytes& key, const std::optional<nb::bytes>& name_space,
                          const std::optional<nb::bytes>& tenant, std::size_t limit) {
        std::optional<Scope> scope;
        if (name_space && tenant) {
            check_key(bytes_of(key));
            scope = {id_of(*name_space, "a namespace"), id_of(*tenant, "a tenant")};
        } else if (key.size() < KEY_START_BYTES) {
            throw std::invalid_argument("at least the first 8 bytes of a key");
        }
        nb::list list;
        for (const Evicted& evicted : index.evictions_of(bytes_of(key), scope, limit)) {
            nb::object newcomer = nb::none();
            if (evicted.newcomer) {
                newcomer = nb::make_tuple(bytes_from(evicted.newcomer->name_space), bytes_from(evicted.newcomer_key));
            }
            list.append(nb::make_tuple(evicted.number, evicted.how.at_ms, static_cast<int>(evicted.how.cause),
                                       evicted.how.evictor, bytes_from(evicted.how.name_space), newcomer));
        }
        return list;
    }
    nb::dict stats() const {
        nb::dict stats;
        for (const auto& [name, value] : index.stats()) stats[name] = value;
        return stats;
    }

    Index index;
};

// ---- Replay ----

struct PyReplay {
    PyReplay(PyIndex& cpu, std::uint64_t cpu_chunks, PyIndex* fs)
        : replay(cpu.index, cpu_chunks, fs != nullptr ? &fs->index : nullptr) {}
    // Requests one after the other: request i is chains[ends[i - 1] .. ends[i]].
    nb::tuple serve(const Array<std::uint64_t>& chains, const Array<std::uint64_t>& ends,
                    const Array<std::uint32_t>& load_ends, const Array<std::uint32_t>& store_ends,
                    const Array<std::uint32_t>& write_ends) {
        const std::size_t count = check_equal(ends.shape(0), load_ends.shape(0), "ends and load_ends");
        check_equal(count, store_ends.shape(0), "ends and store_ends");
        check_equal(count, write_ends.shape(0), "ends and write_ends");
        std::array<std::unique_ptr<std::uint32_t[]>, 4> columns;
        for (auto& column : columns) column = std::make_unique<std::uint32_t[]>(count);
        std::uint64_t begin = 0;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t end = ends.data()[i];
            if (end < begin || end > chains.shape(0)) {
                throw std::invalid_argument("request " + std::to_string(i) + " goes from " + std::to_string(begin) +
                                            " to " + std::to_string(end) + " of " + std::to_string(chains.shape(0)) +
                                            " chunks");
            }
            const Served served = replay.serve(span_of(chains).subspan(begin, end - begin),
                                               {load_ends.data()[i], store_ends.data()[i], write_ends.data()[i]});
            columns[0][i] = served.hits;
            columns[1][i] = served.fs_hits;
            columns[2][i] = served.stored;
            columns[3][i] = served.written;
            begin = end;
        }
        return nb::make_tuple(numpy_of(std::move(columns[0]), count), numpy_of(std::move(columns[1]), count),
                              numpy_of(std::move(columns[2]), count), numpy_of(std::move(columns[3]), count));
    }

    nb::bytes find(const Array<std::uint64_t>& chain) {
        const std::vector<Where> found = replay.find(span_of(chain));
        return nb::bytes(reinterpret_cast<const char*>(found.data()), found.size());
    }

    Replay replay;
};

void translate_system_error(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const std::system_error& failure) {
        const nb::object arguments = nb::make_tuple(failure.code().value(), failure.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

// Checksums and batched file I/O -----------------------------------------------------------------------------------

std::uint32_t crc32c_of_buffer(nb::handle buffer, std::uint32_t (*sum)(const void*, std::size_t)) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    std::uint32_t value;
    {
        const nb::gil_scoped_release release;
        value = sum(view.buf, static_cast<std::size_t>(view.len));
    }
    PyBuffer_Release(&view);
    return value;
}

std::vector<std::byte> head_from(const nb::bytes& head) {
    const auto* from = reinterpret_cast<const std::byte*>(head.c_str());
    return {from, from + head.size()};
}

void bind_io(nb::module_& m) {
    m.def("crc32c", [](nb::handle buffer) { return crc32c_of_buffer(buffer, &crc32c); }, "buffer"_a);
    m.def("crc32c_table", [](nb::handle buffer) { return crc32c_of_buffer(buffer, &crc32c_table); }, "buffer"_a);
    m.def("crc32c_kind", &crc32c_kind);
    m.attr("IO_HEAD_BYTES") = IO_HEAD_BYTES;

    nb::class_<IoDone>(m, "IoDone")
        .def_ro("request", &IoDone::id)
        .def_ro("error", &IoDone::error)
        .def_ro("late", &IoDone::late)
        .def_ro("checksum", &IoDone::checksum)
        .def_prop_ro("head", [](const IoDone& done) { return nb::bytes(done.head.data(), done.head.size()); });

    nb::class_<IoPool>(m, "IoPool")
        .def(nb::init<int, int>(), "n_read_threads"_a, "n_write_threads"_a)
        .def_prop_ro("event_fd", &IoPool::event_fd)
        .def("add_region", &IoPool::add_region, "address"_a, "nbytes"_a)
        .def(
            "read",
            [](IoPool& pool, std::uint64_t request, int fd, std::uint64_t offset, std::uintptr_t address,
               std::uint64_t nbytes, bool with_head, std::uint32_t deadline_ms) {
                pool.submit({.id = request,
                             .is_write = false,
                             .fd = fd,
                             .offset = offset,
                             .address = address,
                             .nbytes = nbytes,
                             .has_head = with_head,
                             .head = {},
                             .deadline = std::chrono::milliseconds(deadline_ms)});
            },
            "request"_a, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(), "with_head"_a = false,
            "deadline_ms"_a = 0)
        .def(
            "read_heads",
            [](IoPool& pool, std::uint64_t first_request, int fd, const std::vector<std::uint64_t>& offsets) {
                const nb::gil_scoped_release release;
                for (std::size_t i = 0; i < offsets.size(); ++i)
                    pool.submit({.id = first_request + i, .fd = fd, .offset = offsets[i], .has_head = true});
            },
            "first_request"_a, "fd"_a, "offsets"_a)
        .def(
            "write",
            [](IoPool& pool, std::uint64_t request, int fd, std::uint64_t offset, std::uintptr_t address,
               std::uint64_t nbytes, const nb::bytes& head, int payload_checksum_at, int head_checksum_at,
               std::uint32_t deadline_ms) {
                pool.submit({.id = request,
                             .is_write = true,
                             .fd = fd,
                             .offset = offset,
                             .address = address,
                             .nbytes = nbytes,
                             .has_head = head.size() > 0,
                             .head = head_from(head),
                             .payload_checksum_at = payload_checksum_at,
                             .head_checksum_at = head_checksum_at,
                             .deadline = std::chrono::milliseconds(deadline_ms)});
            },
            "request"_a, "fd"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(), "head"_a = nb::bytes("", 0),
            "payload_checksum_at"_a = -1, "head_checksum_at"_a = -1, "deadline_ms"_a = 0)
        .def("poll", &IoPool::poll)
        .def(
            "close",
            [](IoPool& pool, double timeout_s) {
                const nb::gil_scoped_release release;
                return pool.close(std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000)));
            },
            "timeout_s"_a);
}

}  // namespace

NB_MODULE(_native, m) {
    // At a process's end its maps and threads are the kernel's to take away; a list of them on the terminal helps
    // nobody.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate_system_error);

    m.attr("SLOT_ALIGNMENT") = SLOT_ALIGNMENT;
    m.attr("KEY_BYTES_MIN") = KEY_BYTES_MIN;
    m.attr("KEY_BYTES_MAX") = KEY_BYTES_MAX;
    m.attr("MISS") = static_cast<int>(Where::MISS);
    m.attr("CPU") = static_cast<int>(Where::CPU);
    m.attr("FS") = static_cast<int>(Where::FS);
    m.attr("PENDING") = static_cast<int>(Where::PENDING);
    m.attr("STORED") = static_cast<int>(CommitCode::STORED);
    m.attr("PRESENT") = static_cast<int>(CommitCode::PRESENT);
    m.attr("TIER_FULL") = static_cast<int>(CommitCode::TIER_FULL);
    m.attr("QUOTA") = static_cast<int>(CommitCode::QUOTA);
    m.attr("NOT_GRANTED") = static_cast<int>(CommitCode::NOT_GRANTED);
    m.attr("EVICTIONS_KEPT") = EVICTIONS_KEPT;
    m.attr("NOBODY") = NOBODY;
    m.attr("POISON") = static_cast<int>(POISON);
    m.attr("COPY_KERNEL") = copy_kernel_name();

    m.def("expand", &expanded, "pieces"_a.noconvert(), "together"_a, "block_ids"_a.noconvert(), "block_count"_a,
          "first"_a, "blocks_per_chunk"_a, "chunks"_a.noconvert(), "wanted"_a.noconvert().none());
    m.def("class_bytes", &class_bytes_of, "chunk_bytes"_a);
    nb::class_<Buffers>(m, "Buffers")
        .def(nb::init<const nb::list&, std::uint64_t, bool>(), "objects"_a, "nbytes"_a, nb::kw_only(), "writable"_a)
        .def("addresses", &Buffers::addresses, "positions"_a);
    m.def("slot_offset", &slot_offset, "slot"_a, "class_bytes"_a, "unit_bytes"_a);
    m.def("slot_addresses", &slot_addresses, "arena"_a, "slots"_a, "class_bytes"_a, "unit_bytes"_a);
    m.def("create_memfd", &create_memfd, "name"_a, "nbytes"_a);
    m.def("seal_arena", &seal_arena, "fd"_a);
    m.def("seal_table", &seal_table, "fd"_a);
    m.def("populate", &populate, "address"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("interleave", &interleave, "address"_a, "nbytes"_a, "nodes"_a);
    m.def(
        "fill",
        [](std::uintptr_t address, std::size_t nbytes, std::uint8_t value) {
            std::memset(reinterpret_cast<void*>(address), value, nbytes);
        },
        "address"_a, "nbytes"_a, "value"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "digest",
        [](const nb::bytes& index_key, const nb::bytes& name_space, const nb::bytes& tenant, const nb::bytes& key) {
            check_key(bytes_of(key));
            const Digest digest = hasher_for(id_of(index_key, "an index key"), id_of(name_space, "a namespace"),
                                             id_of(tenant, "a tenant"))(bytes_of(key));
            return nb::bytes(reinterpret_cast<const char*>(&digest), sizeof digest);
        },
        "index_key"_a, "namespace"_a, "tenant"_a, "key"_a);

    nb::class_<PyTable>(m, "Table")
        .def(nb::init<int, const nb::bytes&>(), "fd"_a, "index_key"_a)
        .def_prop_ro("instance_id",
                     [](const PyTable& self) {
                         return nb::bytes(reinterpret_cast<const char*>(self.instance_id.data()),
                                          self.instance_id.size());
                     })
        .def_prop_ro("arena_bytes", [](const PyTable& self) { return self.shape.arena_bytes; })
        .def_prop_ro("unit_bytes", [](const PyTable& self) { return self.shape.unit_bytes; })
        .def_prop_ro("ready_bytes", &PyTable::ready_bytes)
        .def("heartbeat_age_ms", &PyTable::heartbeat_age_ms)
        .def("premap", &PyTable::premap, "first"_a, "nbytes"_a)
        .def("lookup", &PyTable::lookup, "namespace"_a, "tenant"_a, "keys"_a)
        .def("wait_shown", &PyTable::wait_shown, "namespace"_a, "tenant"_a, "key"_a, "slot"_a, "generation"_a,
             "timeout_s"_a)
        .def("current", &PyTable::current, "slots"_a.noconvert(), "generations"_a.noconvert())
        .def("close", [](PyTable& self) { self.mapped.reset(); });

    nb::class_<PyArena>(m, "Arena", nb::type_slots(arena_slots))
        .def(nb::init<int, std::size_t>(), "fd"_a, "nbytes"_a)
        .def_prop_ro("address",
                     [](const PyArena& self) { return reinterpret_cast<std::uintptr_t>(self.held()->data()); })
        .def_prop_ro("nbytes", [](const PyArena& self) { return self.size; })
        .def("view",
             [](nb::handle_t<PyArena> self) {
                 const nb::object view = nb::steal(PyMemoryView_FromObject(self.ptr()));
                 if (!view.is_valid()) throw nb::python_error();
                 return view;
             })
        .def("close", &PyArena::close);

    nb::class_<Ended>(m, "Finished")
        .def_ro("job", &Ended::job)
        .def_ro("failed", &Ended::failed)
        .def_ro("nbytes", &Ended::nbytes)
        .def_ro("seconds", &Ended::seconds)
        .def_ro("settled", &Ended::settled);

    nb::class_<PyCopier>(m, "Copier")
        .def(nb::init<std::size_t>(), "threads"_a)
        .def(
            "add_region",
            [](PyCopier& self, std::uint64_t address, std::uint64_t nbytes) {
                self.copier->add_region(address, nbytes);
            },
            "address"_a, "nbytes"_a)
        .def("remove_region", &PyCopier::remove_region, "address"_a)
        .def("add_regions", &PyCopier::add_regions, "addresses"_a.noconvert(), "nbytes"_a)
        .def("remove_regions", &PyCopier::remove_regions, "addresses"_a.noconvert())
        .def("submit", &PyCopier::submit, "job"_a, "sources"_a.noconvert(), "destinations"_a.noconvert(),
             "sizes"_a.noconvert(), nb::kw_only(), "table"_a = nb::none(), "slots"_a.noconvert() = nb::none(),
             "generations"_a.noconvert() = nb::none())
        .def("finished", [](PyCopier& self) { return self.copier->finished(); })
        .def("wait", &PyCopier::wait, "jobs"_a, "timeout_s"_a)
        .def("close", &PyCopier::close);

    nb::class_<Removal>(m, "Removal")
        .def_ro("chunks", &Removal::chunks)
        .def_ro("nbytes", &Removal::bytes)
        .def_ro("skipped_pinned", &Removal::skipped_pinned);

    nb::class_<PyIndex>(m, "Index")
        .def(nb::init<int, std::uint64_t, const PyArena*, std::uint64_t, std::uint64_t, const nb::bytes&,
                      const nb::bytes&, const std::string&, bool>(),
             nb::kw_only(), "table_fd"_a, "table_bytes"_a, "arena"_a.none(), "arena_bytes"_a = 0, "unit_bytes"_a,
             "index_key"_a, "instance_id"_a, "eviction_policy"_a = "lru", "verify"_a = false)
        .def_static(
            "table_bytes_for",
            [](std::uint64_t entries, std::uint64_t arena_bytes, std::uint64_t unit_bytes) {
                return TableShape::for_entries(entries, arena_bytes, unit_bytes).table_bytes();
            },
            "entries"_a, "arena_bytes"_a, "unit_bytes"_a)
        .def_static("unit_bytes_for", &unit_bytes_for, "arena_bytes"_a)
        .def("heartbeat", [](PyIndex& self) { self.index.heartbeat(); })
        .def(
            "set_prefaulted", [](PyIndex& self, std::uint64_t nbytes) { self.index.set_prefaulted(nbytes); },
            "nbytes"_a)
        .def("grant", &PyIndex::grant, "group"_a, "chunk_bytes"_a, "count"_a)
        .def("commit", &PyIndex::commit, "group"_a, "namespace"_a, "commits"_a, "now_ms"_a = 0, nb::kw_only(),
             "is_use"_a = true)
        .def(
            "abort",
            [](PyIndex& self, std::uint64_t group, const RefList& refs) {
                return self.index.abort(group, refs_of(refs));
            },
            "group"_a, "refs"_a)
        .def(
            "lease",
            [](PyIndex& self, std::uint64_t group, const RefList& refs, std::uint64_t deadline_ms) {
                return bools(self.index.lease(group, refs_of(refs), deadline_ms));
            },
            "group"_a, "refs"_a, "deadline_ms"_a)
        .def(
            "release",
            [](PyIndex& self, std::uint64_t group, const RefList& refs) {
                return bools(self.index.release(group, refs_of(refs)));
            },
            "group"_a, "refs"_a)
        .def(
            "expire_leases",
            [](PyIndex& self, std::uint64_t now_ms, std::size_t limit) {
                return self.index.expire_leases(now_ms, limit);
            },
            "now_ms"_a, nb::kw_only(), "limit"_a = SIZE_MAX)
        .def(
            "begin_io",
            [](PyIndex& self, std::uint32_t slot, std::uint64_t generation) {
                return self.index.begin_io({slot, generation});
            },
            "slot"_a, "generation"_a)
        .def(
            "end_io",
            [](PyIndex& self, std::uint32_t slot, std::uint64_t generation) { self.index.end_io({slot, generation}); },
            "slot"_a, "generation"_a)
        .def(
            "set_lower",
            [](PyIndex& self, const nb::bytes& name_space, const nb::bytes& tenant, const nb::bytes& key, int where) {
                check_key(bytes_of(key));
                const auto lower = static_cast<Where>(where);
                if (lower != Where::MISS && lower != Where::FS && lower != Where::PENDING) {
                    throw std::invalid_argument("a lower tier shows MISS, FS or PENDING");
                }
                self.index.set_lower(id_of(name_space, "a namespace"), id_of(tenant, "a tenant"), bytes_of(key), lower);
            },
            "namespace"_a, "tenant"_a, "key"_a, "where"_a)
        .def(
            "make_room_for",
            [](PyIndex& self, std::uint32_t evictor, std::uint64_t now_ms) {
                self.index.make_room_for(evictor, now_ms);
            },
            "evictor"_a, "now_ms"_a)
        .def(
            "evicted_below",
            [](PyIndex& self, const nb::bytes& name_space, const nb::bytes& tenant, const nb::bytes& key,
               std::uint64_t now_ms) {
                check_key(bytes_of(key));
                self.index.evicted_below(id_of(name_space, "a namespace"), id_of(tenant, "a tenant"), bytes_of(key),
                                         now_ms);
            },
            "namespace"_a, "tenant"_a, "key"_a, "now_ms"_a)
        .def_prop_ro("evictions_told", [](const PyIndex& self) { return self.index.evictions_told(); })
        .def("evictions_of", &PyIndex::evictions_of, "key"_a, nb::kw_only(), "namespace"_a = nb::none(),
             "tenant"_a = nb::none(), "limit"_a)
        .def(
            "touch",
            [](PyIndex& self, const nb::bytes& name_space, const nb::bytes& tenant, nb::handle keys,
               std::uint64_t now_ms, std::size_t again) {
                self.index.touch(id_of(name_space, "a namespace"), id_of(tenant, "a tenant"), Keys(keys).get(), now_ms,
                                 again);
            },
            "namespace"_a, "tenant"_a, "keys"_a, "now_ms"_a = 0, nb::kw_only(), "again"_a = 0)
        .def("lookup", &PyIndex::lookup, "namespace"_a, "tenant"_a, "keys"_a)
        .def(
            "end_leases",
            [](PyIndex& self, std::uint64_t group, std::size_t limit) { return self.index.end_leases(group, limit); },
            "group"_a, nb::kw_only(), "limit"_a = SIZE_MAX)
        .def("classes_in_use", [](const PyIndex& self) { return self.index.classes_in_use(); })
        .def("begin_removal", &PyIndex::begin_removal, nb::kw_only(), "namespace"_a = nb::none(),
             "tenant"_a = nb::none(), "used_before_ms"_a = nb::none(), "nbytes"_a = nb::none(), "dry_run"_a = false)
        .def(
            "remove",
            [](PyIndex& self, Removal& removal, std::size_t steps) { return self.index.remove(removal, steps); },
            "removal"_a, "steps"_a)
        .def(
            "holds",
            [](const PyIndex& self, const std::optional<nb::bytes>& name_space,
               const std::optional<nb::bytes>& tenant) { return self.index.holds(selection(name_space, tenant)); },
            nb::kw_only(), "namespace"_a = nb::none(), "tenant"_a = nb::none())
        .def("usage", &PyIndex::usage, "after"_a = nb::none(), nb::kw_only(), "limit"_a)
        .def("chunks", &PyIndex::chunks, "start"_a, nb::kw_only(), "namespace"_a = nb::none(), "tenant"_a = nb::none(),
             "steps"_a, "limit"_a)
        .def("next_to_go", &PyIndex::next_to_go, "nbytes"_a, nb::kw_only(), "steps"_a, "limit"_a)
        .def("unwritten", &PyIndex::unwritten, "start"_a, nb::kw_only(), "used_before_ms"_a = nb::none(), "steps"_a,
             "limit"_a)
        .def("used_often", &PyIndex::used_often, "namespace"_a, "tenant"_a, "keys"_a, "uses"_a)
        .def(
            "set_quota",
            [](PyIndex& self, const nb::bytes& tenant, std::optional<std::uint64_t> nbytes) {
                return self.index.set_quota(id_of(tenant, "a tenant"), nbytes);
            },
            "tenant"_a, "nbytes"_a.none())
        .def("stats", &PyIndex::stats)
        .def(
            "order_for_quotas", [](PyIndex& self, std::size_t steps) { return self.index.order_for_quotas(steps); },
            "steps"_a)
        .def(
            "problems_of_chunks",
            [](const PyIndex& self, std::uint32_t next, std::size_t steps) {
                nb::object found = nb::cast(self.index.problems_of_chunks(next, steps));
                return nb::make_tuple(found, next == NO_RECORD ? nb::object(nb::none()) : nb::object(nb::int_(next)));
            },
            "start"_a, nb::kw_only(), "steps"_a)
        .def("problems_of_sums", [](const PyIndex& self) { return self.index.problems_of_sums(); })
        .def("problems", [](const PyIndex& self) { return self.index.problems(); });

    nb::class_<PyReplay>(m, "Replay")
        .def(nb::init<PyIndex&, std::uint64_t, PyIndex*>(), "cpu"_a, "cpu_chunks"_a, "fs"_a.none() = nb::none(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>())
        .def("find", &PyReplay::find, "chain"_a.noconvert())
        .def("serve", &PyReplay::serve, "chains"_a.noconvert(), "ends"_a.noconvert(), "load_ends"_a.noconvert(),
             "store_ends"_a.noconvert(), "write_ends"_a.noconvert());

    bind_io(m);
    bind_cuda(m);
}

}  // namespace kvstore
