//! NVIDIA GPUs: what they can do, in one table, which `docs/preflight.md` shows, and how XLA is told of one that is not
//! there.

use std::fmt::Write;

use super::chip::{Arch, Chip, Gpu, PREFIX};
use oxitorch_format::bytes;

const AMPERE: Arch =
    Arch { major: 8, minor: 0, accelerated: false, threads: 2048, shared_kib: 164, units: 64, fp8: false };
const ADA: Arch =
    Arch { major: 8, minor: 9, accelerated: false, threads: 1536, shared_kib: 100, units: 128, fp8: true };
const HOPPER: Arch =
    Arch { major: 9, minor: 0, accelerated: true, threads: 2048, shared_kib: 228, units: 128, fp8: true };
const BLACKWELL: Arch = Arch { major: 10, ..HOPPER };
const BLACKWELL_ULTRA: Arch = Arch { major: 10, minor: 3, ..HOPPER };
const BLACKWELL_RTX: Arch = Arch { major: 12, minor: 0, ..ADA };

/// Boxes of GPUs.
const BOXES: &[(u32, &str)] = &[(1, "1x1x1"), (2, "1x1x2"), (4, "1x1x4"), (8, "1x1x8")];

/// XLA's GPU client takes three quarters of the memory and no more, unless it is told otherwise.
const fn usable(memory: u64) -> u64 {
    memory / 4 * 3
}

const fn chip(
    (name, also, kind): (&'static str, &'static [&'static str], &'static str),
    gpu: &'static Gpu,
    (tflops, gb_per_s, links): (f64, f64, f64),
) -> Chip {
    Chip {
        name,
        also,
        kind,
        cores: 1,
        devices: 1,
        device_memory: usable(gpu.memory),
        tflops,
        gb_per_s,
        mxu: 0, // nobody says what fills the tensor cores
        ici_gb_per_s: links,
        topologies: BOXES,
        gpu: Some(gpu),
    }
}

const A100: Gpu = Gpu {
    arch: &AMPERE,
    cores: 108,
    l2_mib: 40,
    clock_ghz: 1.41,
    memory: 85_100_068_864,
    tf32: 156.0,
    fp32: 19.5,
    nvlink: true,
};
const A100_40: Gpu = Gpu { memory: 42_298_834_944, ..A100 };
const H100: Gpu = Gpu {
    arch: &HOPPER,
    cores: 132,
    l2_mib: 50,
    clock_ghz: 1.98,
    memory: 84_942_979_072,
    tf32: 494.5,
    fp32: 67.0,
    nvlink: true,
};
const H200: Gpu = Gpu { memory: 150_119_841_628, ..H100 };
const B200: Gpu = Gpu {
    arch: &BLACKWELL,
    cores: 148,
    l2_mib: 126,
    clock_ghz: 1.965,
    memory: 191_514_411_008,
    tf32: 1125.0,
    fp32: 75.0,
    nvlink: true,
};
const B300: Gpu = Gpu { arch: &BLACKWELL_ULTRA, memory: 297_021_865_984, ..B200 };
const L4: Gpu = Gpu {
    arch: &ADA,
    cores: 58,
    l2_mib: 48,
    clock_ghz: 2.04,
    memory: 23_654_832_537,
    tf32: 60.0,
    fp32: 30.3,
    nvlink: false,
};
const L40S: Gpu =
    Gpu { cores: 142, l2_mib: 96, clock_ghz: 2.52, memory: 47_663_399_567, tf32: 183.0, fp32: 91.6, ..L4 };
const RTX_4090: Gpu =
    Gpu { cores: 128, l2_mib: 72, clock_ghz: 2.52, memory: 25_254_407_700, tf32: 82.6, fp32: 82.6, ..L4 };
const RTX_5090: Gpu = Gpu {
    arch: &BLACKWELL_RTX,
    cores: 170,
    l2_mib: 96,
    clock_ghz: 2.41,
    memory: 33_672_543_109,
    tf32: 104.8,
    fp32: 104.8,
    nvlink: false,
};

/// All of them, oldest first.
///
/// Peaks, bandwidths and links (both directions together) are the vendor's: the data sheets of A100, H100, H200, L4 and L40S,
/// of HGX and DGX systems for B200 and B300 (an eighth of eight), and the white papers of the Ada and RTX Blackwell
/// architectures. Where a number is said to be with sparsity, it is half of it here.
pub(crate) const GPUS: &[Chip] = &[
    chip(("a100", &["a100-80gb"], "NVIDIA A100-SXM4-80GB"), &A100, (312.0, 2039.0, 600.0)),
    chip(("a100-40gb", &[], "NVIDIA A100-SXM4-40GB"), &A100_40, (312.0, 1555.0, 600.0)),
    chip(("h100", &["h100-80gb", "h100-sxm"], "NVIDIA H100 80GB HBM3"), &H100, (989.5, 3350.0, 900.0)),
    chip(("h200", &["h200-141gb", "h200-sxm"], "NVIDIA H200"), &H200, (989.5, 4800.0, 900.0)),
    chip(("l4", &[], "NVIDIA L4"), &L4, (121.0, 300.0, 64.0)),
    chip(("l40s", &[], "NVIDIA L40S"), &L40S, (362.0, 864.0, 64.0)),
    chip(("rtx4090", &["rtx-4090", "4090"], "NVIDIA GeForce RTX 4090"), &RTX_4090, (165.2, 1008.0, 64.0)),
    chip(("b200", &[], "NVIDIA B200"), &B200, (2250.0, 8000.0, 1800.0)),
    chip(("b300", &[], "NVIDIA B300"), &B300, (2250.0, 8000.0, 1800.0)),
    chip(("rtx5090", &["rtx-5090", "5090"], "NVIDIA GeForce RTX 5090"), &RTX_5090, (209.5, 1792.0, 128.0)),
];

/// A GPU as XLA wants it described (`GpuTargetConfigProto`); none if the chip is not one.
pub(crate) fn target_config(chip: &Chip) -> Option<String> {
    let gpu = chip.gpu?;
    let Arch { major, minor, accelerated, threads, shared_kib, units, .. } = *gpu.arch;
    let feature = if accelerated { "ACCELERATED_FEATURES" } else { "NONE" };
    let mut out = String::from("gpu_device_info {\n");
    let mut field = |name: &str, value: u64| _ = writeln!(out, "  {name}: {value}");
    field("threads_per_block_limit", 1024);
    field("threads_per_warp", 32);
    field("shared_memory_per_block", 48 << 10);
    field("shared_memory_per_core", u64::from(shared_kib) << 10);
    field("shared_memory_per_block_optin", u64::from(shared_kib - 1) << 10);
    field("threads_per_core_limit", threads.into());
    field("core_count", gpu.cores.into());
    field("fpus_per_core", units.into());
    field("block_dim_limit_x", (1 << 31) - 1);
    field("block_dim_limit_y", 65_535);
    field("block_dim_limit_z", 65_535);
    field("thread_dim_limit_x", 1024);
    field("thread_dim_limit_y", 1024);
    field("thread_dim_limit_z", 64);
    field("registers_per_core_limit", 65_536);
    field("registers_per_block_limit", 65_536);
    field("memory_bandwidth", (chip.gb_per_s * 1e9) as u64);
    field("l2_cache_size", gpu.l2_mib << 20);
    field("device_memory_size", gpu.memory);
    let _ = writeln!(out, "  clock_rate_ghz: {}", gpu.clock_ghz);
    let _ = writeln!(
        out,
        "  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}"
    );
    let _ = writeln!(out, "  name: {:?}\n}}", chip.kind);
    // The version of cuDNN decides which convolutions XLA leaves to it.
    let _ = writeln!(out, "platform_name: \"CUDA\"\ndnn_version_info {{ major: 9 minor: 10 }}");
    let _ = writeln!(out, "device_description_str: {:?}", chip.kind);
    Some(out)
}

/// The least time of a collective on a tensor of so many bytes between so many GPUs of a box, each of which reaches all
/// others at its links' full speed: what a GPU has to send, without latency. Sums in the switch (NVLink SHARP) are not
/// thought of.
///
/// Source: Austin et al., How to Scale Your Model, "How to Think About GPUs" (jax-ml.github.io/scaling-book/gpus).
pub(crate) fn seconds(chip: &Chip, kind: &str, size: u64, devices: u64) -> f64 {
    let (v, n) = (size as f64, devices as f64);
    let sent_per_s = chip.ici_gb_per_s * 1e9 / 2.0;
    match kind {
        _ if devices < 2 => 0.0,
        "all-reduce" => 2.0 * v * (n - 1.0) / n / sent_per_s,
        "collective-permute" | "collective-broadcast" => v / sent_per_s,
        _ => v * (n - 1.0) / n / sent_per_s,
    }
}

/// What of the memory of a topology's GPU a program may use, in words.
pub(crate) fn share(topology: &str) -> Option<String> {
    let name = topology.split(':').next()?;
    let gpu = GPUS.iter().find(|c| c.name == name)?.gpu?;
    Some(format!("three quarters of the GPU's {}, which is what XLA's client takes", bytes(gpu.memory)))
}

/// Finds a GPU and a number of them in what stands behind `cuda:`: `h200`, `h200-8`, `a100-40gb-2`.
pub(crate) fn parse(name: &str) -> Option<(&'static Chip, u32, &'static str)> {
    let find = |name: &str| GPUS.iter().find(|c| c.name == name || c.also.contains(&name));
    let (chip, n) = match find(name) {
        Some(chip) => (chip, 1),
        None => {
            let (name, n) = name.rsplit_once('-')?;
            (find(name)?, n.parse().ok()?)
        }
    };
    let &(n, topology) = chip.topologies.iter().find(|(known, _)| *known == n)?;
    Some((chip, n, topology))
}

/// The names of slices of a GPU.
pub(crate) fn names(chip: &'static Chip) -> impl Iterator<Item = String> {
    let one = |name: &str| PREFIX.to_owned() + name;
    let families = std::iter::once(&chip.name).chain(chip.also);
    families.flat_map(move |f| {
        chip.topologies.iter().map(move |(n, _)| if *n == 1 { one(f) } else { one(&format!("{f}-{n}")) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxitorch_hlo::{DType, Precision};

    fn gpu(name: &str) -> &'static Chip {
        parse(name).unwrap().0
    }

    #[test]
    fn the_names_that_people_use() {
        for (name, chip, n) in [
            ("h200", "h200", 1),
            ("h200-8", "h200", 8),
            ("h200-1", "h200", 1),
            ("a100", "a100", 1),
            ("a100-80gb-4", "a100", 4),
            ("a100-40gb", "a100-40gb", 1),
            ("a100-40gb-8", "a100-40gb", 8),
            ("rtx-4090-2", "rtx4090", 2),
            ("4090", "rtx4090", 1),
        ] {
            let (found, count, topology) = parse(name).unwrap();
            assert_eq!((found.name, count, topology), (chip, n, format!("1x1x{n}").as_str()), "{name}");
        }
        for name in ["", "h200-", "h200-3", "h200x8", "h200-8-8", "a100-41gb", "-8"] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    #[test]
    fn float32_products_take_the_time_of_their_units() {
        let passes = |name: &str, dtype, precision| gpu(name).passes(dtype, precision);
        assert_eq!(passes("h200", DType::F32, Precision::Highest), 989.5 / 67.0);
        assert_eq!(passes("h200", DType::F32, Precision::High), 989.5 / 494.5);
        assert_eq!(passes("h200", DType::F32, Precision::Default), 989.5 / 494.5);
        assert_eq!(passes("h200", DType::BF16, Precision::Highest), 1.0);
        assert_eq!(
            (
                passes("l4", DType::F8E4M3FN, Precision::Default),
                passes("a100", DType::F8E4M3FN, Precision::Default)
            ),
            (0.5, 1.0)
        );
        assert_eq!(passes("rtx4090", DType::F32, Precision::Highest), 2.0);
    }

    #[test]
    fn collectives_take_what_a_gpu_sends() {
        let v = 1_000_000_000;
        for (name, kind, n, expected) in [
            ("h200", "all-gather", 8, 0.875 / 450.0),
            ("h200", "reduce-scatter", 2, 0.5 / 450.0),
            ("h200", "all-reduce", 8, 1.75 / 450.0),
            ("b200", "all-to-all", 4, 0.75 / 900.0),
            ("a100", "collective-permute", 8, 1.0 / 300.0),
            ("l4", "all-gather", 2, 0.5 / 32.0),
            ("l4", "all-gather", 1, 0.0),
        ] {
            let found = seconds(gpu(name), kind, v, n);
            assert!((found - expected).abs() < 1e-12, "{name} {kind} {n}: {found} {expected}");
        }
    }

    #[test]
    fn xla_is_told_what_the_gpu_has() {
        let text = target_config(gpu("b200")).unwrap();
        for line in [
            "core_count: 148\n",
            "cuda_compute_capability { major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }\n",
            "memory_bandwidth: 8000000000000\n",
            "shared_memory_per_core: 233472\n",
            "shared_memory_per_block_optin: 232448\n",
            "name: \"NVIDIA B200\"\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        let text = target_config(gpu("a100")).unwrap();
        assert!(
            text.contains("major: 8 minor: 0 feature_extension: NONE")
                && text.contains("fpus_per_core: 64\n")
        );
        let tpu = crate::hardware::Slice::parse("v5e-1").unwrap();
        assert_eq!(target_config(tpu.chip().unwrap()), None);
    }

    #[test]
    fn the_documentation_has_this_table() {
        let page = include_str!("../../../../docs/preflight.md");
        for c in GPUS {
            let gpu = c.gpu.unwrap();
            let links = if gpu.nvlink { "NVLink" } else { "PCIe" };
            let numbers = format!(
                "{} | {} | {} | {} | {links} {} | {} | {}",
                c.tflops, gpu.tf32, gpu.fp32, c.gb_per_s, c.ici_gb_per_s, gpu.memory, c.device_memory
            );
            let row = format!("| {} | {} | {numbers} |", c.name, c.also.join(", ")).replace("|  |", "| |");
            assert!(page.contains(&row), "docs/preflight.md lacks\n{row}");
        }
    }
}
