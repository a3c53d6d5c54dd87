// What this machine has, how fast it is, and the CPU's kernels by themselves.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/interpreter.h"
#include "core/error.h"
#include "cpu/kernels.h"
#include "hardware/devices.h"
#include "hardware/hardware_probe.h"
#include "memory/host_memory.h"

namespace sharpi {

namespace {

py::array_t<float> dequantize(uint32_t type, const py::bytes& data, int64_t cols) {
    const DTypeInfo* dtype = findDType(type);
    if (!dtype) throw Error(ErrorKind::InvalidArgument, "unknown type " + std::to_string(type));
    const auto bytes = static_cast<std::string_view>(data);
    if (cols <= 0 || cols % dtype->blockElements)
        throw Error(ErrorKind::InvalidArgument, "the number of columns must be a multiple of the type's block");
    const size_t stride = rowBytes(dtype->type, cols);
    if (bytes.size() % stride) throw Error(ErrorKind::InvalidArgument, "the data does not end with a whole row");
    const auto rows = static_cast<py::ssize_t>(bytes.size() / stride);
    py::array_t<float> out({rows, static_cast<py::ssize_t>(cols)});
    float* const to = out.mutable_data();
    const ReleasedGil release;
    for (py::ssize_t r = 0; r < rows; ++r) {
        cpu::kernels().dequantizeRow(dtype->type, bytes.data() + r * stride, cols, to + r * cols);
    }
    return out;
}

py::dict measure(int threads, size_t most, int ordinal) {
    HardwareRates rates;
    {
        const ReleasedGil release;
        rates = measureHardware(threads, most, ordinal);
    }
    py::dict values;
    values["ram_bytes_per_second"] = rates.ramBytesPerSecond;
    values["cpu_flops"] = rates.cpuFlops;
    py::dict costs;
    for (const TypeCost& each : rates.typeCosts) costs[info(each.type).name] = each.cost;
    values["cpu_type_costs"] = costs;
    if (rates.gpu) {
        values["pcie_bytes_per_second"] = rates.gpu->pcieBytesPerSecond;
        values["ram_bytes_per_second_shared"] = rates.gpu->ramBytesPerSecondShared;
        values["pcie_bytes_per_second_shared"] = rates.gpu->pcieBytesPerSecondShared;
        values["vram_bytes_per_second"] = rates.gpu->vramBytesPerSecond;
        values["gpu_kernel_seconds"] = rates.gpu->kernelSeconds;
        values["gpu_flops"] = rates.gpu->flops;
    } else {
        values["gpu_missing"] = rates.gpuMissing;
    }
    return values;
}

}  // namespace

void bindHardware(py::module_& m) {
    m.def("dequantize", &dequantize, py::arg("ggml_type"), py::arg("data"), py::arg("cols"),
          "Rows of a quantized format as float32 [rows, cols].");
    m.def("cpu_isa", [] { return cpu::kernels().name; }, "The instruction set that the CPU's kernels use here.");
    m.def(
        "free_ram", [] { return memoryRoom().available; },
        "Bytes of RAM that this process can still take without swapping, cached pages of files included.");
    m.def(
        "find_cuda_device",
        [](int ordinal) {
            const cuda::DeviceInfo gpu = [ordinal] {
                const ReleasedGil release;  // the first use of a GPU takes a while
                return findGpu(ordinal);
            }();
            py::dict info;
            info["name"] = gpu.name;
            info["index"] = gpu.index;
            info["compute_capability"] = std::to_string(gpu.major) + "." + std::to_string(gpu.minor);
            info["multiprocessors"] = gpu.multiprocessors;
            info["total_bytes"] = gpu.totalBytes;
            info["free_bytes"] = gpu.freeBytes;
            return info;
        },
        py::arg("ordinal"), "The GPU with this number. Raises InvalidRequestError with the reason if there is none.");
    m.def("measure_hardware", &measure, py::arg("threads"), py::arg("most_bytes"), py::arg("ordinal"),
          "Measures in a few seconds how fast the CPU, the GPU and the bus between them are: for each rate a list of "
          "samples. Samples of the two \"_shared\" rates with the same index were taken together. \"cpu_type_costs\" "
          "has, by type, the time in which the CPU reads a byte of weights, as a multiple of Q4_K's. \"gpu_missing\" "
          "says why there are no rates of a GPU. most_bytes: the most to take of each memory. ordinal: the GPU's "
          "number. Raises OutOfMemoryError if too little can be had.");
}

}  // namespace sharpi
