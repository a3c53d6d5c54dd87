// See hardware_probe.h.
#include "hardware/hardware_probe.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <utility>

#include "core/blocks.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "hardware/devices.h"
#include "memory/host_memory.h"

#ifdef SHARPI_WITH_CUDA
#include "device/cuda_probe.h"
#endif

namespace sharpi {

namespace {

constexpr size_t kLeastBytes = size_t{1} << 20;
constexpr double kSpanSeconds = 0.01;  // long enough that the clock's resolution does not matter
// The size of a feed-forward matrix of an 8B model, so that loops are as long as in its decode.
constexpr int64_t kCols = 4096, kRows = 12288;
constexpr int64_t kBatch = 256, kBatchRows = 4096, kLeastBatchRows = 64;
constexpr int64_t kRowTile = 16;
constexpr uint16_t kScale = 0x1c00;  // 2^-8 in f16
constexpr uint8_t kExponent = 119;   // 2^-8 in E8M0
// One for each kind of type: see python/sharpi/machine/type_costs.py.
constexpr DType kCostTypes[] = {DType::Q6_K, DType::Q8_0, DType::MXFP4, DType::IQ3_S};

// A mapped file has small pages. These need more address translations than the large pages that the system may give
// to plain memory.
void useSmallPages(const Buffer& memory) {
#ifdef MADV_NOHUGEPAGE
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(memory.as<uint8_t>());
    const uintptr_t first = (begin + page - 1) / page * page, end = (begin + memory.bytes()) / page * page;
    // A system that refuses has no large pages.
    if (first < end) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_NOHUGEPAGE);
#else
    (void)memory;
#endif
}

// Multiplies matrices as CpuBackend does, and enough of them that caches do not help. They are Q4_K but for
// typeCosts().
class CpuProbe {
public:
    CpuProbe(int threads, size_t most);
    // These take one sample.
    double ramBytesPerSecond() { return rateOf(products(kSampleSeconds)); }
    double flops();
    // Does one-row products, one matrix after another, for this time.
    std::vector<Span> products(double seconds, DType type = DType::Q4_K);
    // Comes last: the weights are not Q4_K's afterwards.
    std::vector<TypeCost> typeCosts();

private:
    // How many matrices of a type there are, and their rows.
    struct Matrices {
        int64_t rows, count;
    };
    Matrices matrices(DType type) const;
    void fillWeights();
    void fillExponents();
    void fillInput();
    void multiply(const Matrix& w, int64_t count);
    Matrix matrix(DType type, int64_t index, int64_t rows) const;

    const cpu::Kernels& _kernels;
    ThreadPool _pool;
    HostMemory _memory;
    Allocator _allocator;
    Buffer _weights, _input, _output, _scratch;
    cpu::QuantizedRows _x;
    size_t _scratchStride;
    int64_t _next = 0;       // the number of the next matrix
    int64_t _batchRows = 0;  // rows of the matrix that flops() multiplies a batch with; 0: not chosen yet
};

CpuProbe::CpuProbe(int threads, size_t most)
    : _kernels(cpu::kernels()),
      _pool(threads),
      _allocator(_memory),
      _scratchStride(Allocator::aligned(cpu::matmulScratchBytes(kCols))) {
    const size_t wanted = std::max(kLeastBytes, std::min(most, _memory.freeBytes() / 4));
    _weights = takeUpTo(_allocator, wanted, kLeastBytes, "weights to measure with");
    _input = Buffer(_allocator, cpu::quantizedRowsBytes(kBatch, kCols), "activations to measure with");
    _output = Buffer(_allocator, sizeof(float) * static_cast<size_t>(std::max(kRows, kBatch * kBatchRows)),
                     "results of measuring");
    _scratch =
        Buffer(_allocator, _scratchStride * static_cast<size_t>(_pool.threads()), "working memory to measure with");
    useSmallPages(_weights);
    fillWeights();
    fillInput();
}

CpuProbe::Matrices CpuProbe::matrices(DType type) const {
    const int64_t held = static_cast<int64_t>(_weights.bytes() / rowBytes(type, kCols)) / kRowTile * kRowTile;
    const int64_t rows = std::min(kRows, held);
    return {rows, held / rows};
}

void CpuProbe::fillWeights() {
    constexpr int64_t kPiece = 8192;  // blocks
    const auto blocks = static_cast<int64_t>(_weights.bytes() / sizeof(BlockQ4_K));
    auto* all = _weights.as<BlockQ4_K>();
    _pool.run((blocks + kPiece - 1) / kPiece, [&](int64_t piece, int) {
        BlockQ4_K* first = all + piece * kPiece;
        const int64_t count = std::min(kPiece, blocks - piece * kPiece);
        fillRandom(reinterpret_cast<uint64_t*>(first), static_cast<size_t>(count) * sizeof(BlockQ4_K) / 8,
                   static_cast<uint64_t>(piece));
        for (int64_t i = 0; i < count; ++i) first[i].d = first[i].dmin = kScale;  // random ones could be NaN
    });
}

void CpuProbe::fillInput() {
    std::vector<uint64_t> words(kCols);
    std::vector<float> row(kCols);
    _x = cpu::quantizedRowsOver(_input.as<uint8_t>(), kBatch, kCols);
    for (int64_t t = 0; t < kBatch; ++t) {
        fillRandom(words.data(), words.size(), static_cast<uint64_t>(t));
        for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<float>(static_cast<int32_t>(words[i])) * 0x1p-31f;
        _kernels.quantizeRow(row.data(), kCols, _x.q + t * _x.qStride, _x.scale + t * _x.scaleStride,
                             _x.sums + t * _x.sumStride);
    }
}

// Exponents of any size make numbers that processors are slow with.
void CpuProbe::fillExponents() {
    constexpr int64_t kPiece = 65536;  // blocks
    const auto blocks = static_cast<int64_t>(_weights.bytes() / sizeof(BlockMXFP4));
    auto* all = _weights.as<BlockMXFP4>();
    _pool.run((blocks + kPiece - 1) / kPiece, [&](int64_t piece, int) {
        for (int64_t i = piece * kPiece; i < std::min(blocks, (piece + 1) * kPiece); ++i) all[i].e = kExponent;
    });
}

Matrix CpuProbe::matrix(DType type, int64_t index, int64_t rows) const {
    const size_t bytes = rowBytes(type, kCols) * static_cast<size_t>(matrices(type).rows);
    return {type, rows, kCols, _weights.as<uint8_t>() + static_cast<size_t>(index) * bytes};
}

void CpuProbe::multiply(const Matrix& w, int64_t count) {
    cpu::MatmulArgs args;
    args.w = w;
    args.xQuant = &_x;
    args.count = count;
    args.y = _output.as<float>();
    args.yStride = w.rows;
    const int64_t wanted = std::max<int64_t>(kRowTile, w.rows / (int64_t{8} * _pool.threads()));
    const int64_t piece = (wanted + kRowTile - 1) / kRowTile * kRowTile;
    _pool.run((w.rows + piece - 1) / piece, [&](int64_t i, int worker) {
        _kernels.matmul(args, i * piece, std::min((i + 1) * piece, w.rows),
                        _scratch.as<uint8_t>() + static_cast<size_t>(worker) * _scratchStride);
    });
}

std::vector<Span> CpuProbe::products(double seconds, DType type) {
    const Matrices all = matrices(type);
    const auto bytes = static_cast<double>(rowBytes(type, kCols) * static_cast<size_t>(all.rows));
    std::vector<Span> spans;
    double now = secondsNow();
    const double end = now + seconds;
    do {
        Span span{now, now, 0};
        do {
            multiply(matrix(type, _next % all.count, all.rows), 1);
            ++_next;
            span.bytes += bytes;
            span.end = now = secondsNow();
        } while (span.end - span.begin < kSpanSeconds);
        spans.push_back(span);
    } while (now < end);
    return spans;
}

// The bytes are the same for all types: what they say does not matter for the time.
std::vector<TypeCost> CpuProbe::typeCosts() {
    fillExponents();
    const auto best = [](double& rate, double sample) { rate = std::max(rate, sample); };
    double plain = 0;
    std::vector<double> rates(std::size(kCostTypes));
    for (size_t sample = 0; sample <= kTypeSamples; ++sample) {
        const bool counts = sample > 0;
        const double q4 = rateOf(products(kTypeSeconds));
        if (counts) best(plain, q4);
        for (size_t i = 0; i < rates.size(); ++i) {
            const double rate = rateOf(products(kTypeSeconds, kCostTypes[i]));
            if (counts) best(rates[i], rate);
        }
    }
    std::vector<TypeCost> costs;
    for (size_t i = 0; i < rates.size(); ++i) costs.push_back({kCostTypes[i], plain / rates[i]});
    return costs;
}

double CpuProbe::flops() {
    const auto secondsOf = [&](int64_t rows) {
        const double begin = secondsNow();
        multiply(matrix(DType::Q4_K, 0, rows), kBatch);
        return secondsNow() - begin;
    };
    if (!_batchRows) {  // what a sample has time for: without vector instructions, a whole matrix takes seconds
        const int64_t held = matrices(DType::Q4_K).rows;
        const int64_t few = std::min(kLeastBatchRows, held), most = std::min(kBatchRows, held);
        secondsOf(few);
        const auto inTime = static_cast<int64_t>(kSampleSeconds / secondsOf(few) * static_cast<double>(few));
        _batchRows = std::clamp(inTime / kRowTile * kRowTile, few, most);
    }
    int64_t rows = 0;
    double seconds = 0;
    do {
        seconds += secondsOf(_batchRows);
        rows += _batchRows;
    } while (seconds < kSampleSeconds);
    return 2.0 * static_cast<double>(kBatch * rows * kCols) / seconds;
}

#ifdef SHARPI_WITH_CUDA

// Takes a sample of the CPU's products while the copy engine runs. Returns the rate of the CPU, then of the copies.
std::vector<double> measureTogether(CpuProbe& cpu, CudaProbe& gpu) {
    std::atomic<bool> enough{false};
    std::future<std::vector<Span>> copies =
        std::async(std::launch::async, [&] { return gpu.copies([&] { return enough.load(); }); });
    struct End {  // stops the copies also if a product throws
        std::atomic<bool>& enough;
        ~End() { enough = true; }
    };
    std::vector<Span> products;
    {
        const End end{enough};
        products = cpu.products(kSampleSeconds);
    }
    const auto [ram, pcie] = ratesTogether(products, copies.get());
    return {ram, pcie};
}

void measureAll(CpuProbe& cpu, Series& ram, Series& flops, const std::optional<cuda::DeviceInfo>& device, size_t most,
                HardwareRates& rates) {
    if (!device) return sampleInTurn({&ram, &flops});
    CudaProbe gpu(*device, most);
    Series pcie{[&] { return std::vector<double>{gpu.pcieBytesPerSecond()}; }};
    Series both{[&] { return measureTogether(cpu, gpu); }};
    Series vram{[&] { return std::vector<double>{gpu.vramBytesPerSecond()}; }};
    Series kernels{[&] { return std::vector<double>{1 / gpu.kernelSeconds()}; }};
    Series products{[&] { return std::vector<double>{gpu.flops()}; }};
    sampleInTurn({&ram, &flops, &pcie, &both, &vram, &kernels, &products});
    Samples kernelSeconds = kernels.rate();
    for (double& seconds : kernelSeconds) seconds = 1 / seconds;
    rates.gpu =
        GpuRates{pcie.rate(), both.rate(0), both.rate(1), vram.rate(), std::move(kernelSeconds), products.rate()};
}

#else

void measureAll(CpuProbe&, Series& ram, Series& flops, const std::optional<cuda::DeviceInfo>&, size_t, HardwareRates&) {
    sampleInTurn({&ram, &flops});
}

#endif

}  // namespace

double secondsNow() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double rateOf(const std::vector<Span>& spans) {
    double bytes = 0;
    for (const Span& span : spans) bytes += span.bytes;
    return bytes / (spans.back().end - spans.front().begin);
}

bool Series::settled() const {
    if (samples.size() >= kMostSamples) return true;
    double best = 0;
    size_t calm = 0;
    for (const std::vector<double>& sample : samples) {
        const double sum = std::accumulate(sample.begin(), sample.end(), 0.0);
        calm = sum > best * (1 + kRise) ? 0 : calm + 1;
        best = std::max(best, sum);
    }
    return samples.size() >= kLeastSamples && calm >= kCalmSamples;
}

Samples Series::rate(size_t index) const {
    Samples values;
    for (const std::vector<double>& sample : samples) values.push_back(sample.at(index));
    return values;
}

void sampleInTurn(const std::vector<Series*>& series) {
    for (Series* each : series) each->take();
    for (bool more = true; more;) {
        more = false;
        for (Series* each : series) {
            if (each->settled()) continue;
            each->samples.push_back(each->take());
            more = true;
        }
    }
}

std::pair<double, double> ratesTogether(const std::vector<Span>& one, const std::vector<Span>& other) {
    if (one.empty() || other.empty()) throw Error(ErrorKind::Internal, "nothing was measured");
    const double begin = std::max(one.front().begin, other.front().begin),
                 end = std::min(one.back().end, other.back().end);
    if (!(begin < end)) throw Error(ErrorKind::Internal, "two measurements that must run at the same time did not");
    const auto rate = [&](const std::vector<Span>& spans) {
        double bytes = 0;
        for (const Span& span : spans) {
            const double shared = std::min(span.end, end) - std::max(span.begin, begin);
            if (shared > 0) bytes += span.bytes * shared / (span.end - span.begin);
        }
        return bytes / (end - begin);
    };
    return {rate(one), rate(other)};
}

Buffer takeUpTo(Allocator& allocator, size_t wanted, size_t least, const std::string& name) {
    for (size_t bytes = wanted;; bytes /= 2) {
        try {
            return Buffer(allocator, bytes, name);
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::OutOfMemory || bytes / 2 < least) throw;
        }
    }
}

void fillRandom(uint64_t* words, size_t count, uint64_t seed) {
    // Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014), SplitMix64.
    uint64_t state = seed * 0xd1342543de82ef95u;
    for (size_t i = 0; i < count; ++i) {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        words[i] = z ^ (z >> 31);
    }
}

HardwareRates measureHardware(int threads, size_t most, int ordinal) {
    if (threads < 1 || threads > 1024)
        throw Error(ErrorKind::InvalidArgument, "threads must be 1 to 1024, not " + std::to_string(threads));
    if (most < kLeastBytes) {
        throw Error(ErrorKind::InvalidArgument, "measuring needs at least " + std::to_string(kLeastBytes) +
                                                    " bytes of memory, not " + std::to_string(most));
    }
    HardwareRates rates;
    std::optional<cuda::DeviceInfo> gpu;
    try {
        gpu = findGpu(ordinal);
    } catch (const Error& error) {  // a GPU that cannot be opened counts as none
        rates.gpuMissing = error.what();
    }
    CpuProbe cpu(threads, most);
    Series ram{[&] { return std::vector<double>{cpu.ramBytesPerSecond()}; }};
    Series flops{[&] { return std::vector<double>{cpu.flops()}; }};
    measureAll(cpu, ram, flops, gpu, most, rates);
    rates.typeCosts = cpu.typeCosts();
    rates.ramBytesPerSecond = ram.rate();
    rates.cpuFlops = flops.rate();
    return rates;
}

}  // namespace sharpi
