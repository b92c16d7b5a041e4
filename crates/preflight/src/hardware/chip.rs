//! Kinds of chips, and what they can do.

use oxitorch_hlo::{DType, Precision};

/// What stands before the names of GPUs.
pub(crate) const PREFIX: &str = "cuda:";

/// A kind of chip.
///
/// Peaks are of dense bfloat16 products. Numbers are per chip and come from the vendor's pages of the chips
/// (cloud.google.com/tpu/docs/v3, v4, v5e, v5p, v6e, tpu7x, read in November 2026); the memory that a program may use is
/// libtpu 0.0.51's `device_memory_bytes_limit`.
#[derive(Debug, PartialEq)]
pub(crate) struct Chip {
    /// How libtpu calls it, in the names of topologies.
    pub(crate) name: &'static str,
    /// Other names that people use.
    pub(crate) also: &'static [&'static str],
    /// How the devices call themselves.
    pub(crate) kind: &'static str,
    /// TensorCores; slices of chips that have two are named by cores, the others by chips.
    pub(crate) cores: u32,
    /// Devices that a program sees.
    pub(crate) devices: u32,
    /// What a program may use of a device's memory, in bytes.
    pub(crate) device_memory: u64,
    pub(crate) tflops: f64,
    /// Of the memory.
    pub(crate) gb_per_s: f64,
    /// Rows and columns of a matrix unit.
    pub(crate) mxu: u64,
    /// Of all links to other chips, both directions together: the vendor's number, and for v3 and v4 the all-reduce
    /// bandwidth of a pod (340 TB/s, 1.1 PB/s) for each of its 1024 or 4096 chips, twice, as it is for the others.
    pub(crate) ici_gb_per_s: f64,
    /// The topologies that slices have, by their number of chips.
    pub(crate) topologies: &'static [(u32, &'static str)],
    /// What it is besides, if it is a GPU.
    pub(crate) gpu: Option<&'static Gpu>,
}

/// What is special about a GPU.
///
/// Memory is what a driver says of the whole: XLA's own descriptions (xla/backends/gpu/target_config/specs) for A100, H100,
/// B200 and B300, what PyTorch says when it is full for the others.
#[derive(Debug, PartialEq)]
pub(crate) struct Gpu {
    pub(crate) arch: &'static Arch,
    /// Streaming multiprocessors.
    pub(crate) cores: u32,
    pub(crate) l2_mib: u64,
    pub(crate) clock_ghz: f64,
    /// In bytes, of which [`Chip::device_memory`] is what a program may use.
    pub(crate) memory: u64,
    /// TFLOP/s of dense products of float32 in TF32, and without it.
    pub(crate) tf32: f64,
    pub(crate) fp32: f64,
    /// Whether the links are NVLink through a switch; PCIe if not.
    pub(crate) nvlink: bool,
}

/// What GPUs of a compute capability have in common (CUDA C++ Programming Guide, "Compute Capabilities").
#[derive(Debug, PartialEq)]
pub(crate) struct Arch {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Whether code for exactly this capability can do more (`sm_90a`).
    pub(crate) accelerated: bool,
    pub(crate) threads: u32,
    /// Shared memory of a multiprocessor, of which a block has 1 KiB less at most.
    pub(crate) shared_kib: u32,
    /// Units for float32 in a multiprocessor.
    pub(crate) units: u32,
    /// Whether there are products of 8-bit floats, twice as quick as those of bfloat16.
    pub(crate) fp8: bool,
}

impl Chip {
    /// The name of the slice with so many chips.
    pub(crate) fn slice_name(&self, chips: u32) -> String {
        let before = if self.gpu.is_some() { PREFIX } else { "" };
        format!("{before}{}-{}", self.name, chips * self.cores)
    }

    /// How many times longer a product takes than one of bfloat16.
    pub(crate) fn passes(&self, dtype: DType, precision: Precision) -> f64 {
        match self.gpu {
            Some(gpu) => gpu.passes(self.tflops, dtype, precision),
            None => passes(dtype, precision),
        }
    }

    /// Chips and topology of a slice: without a size the smallest, `8` as slices are named, or a topology.
    pub(super) fn topology(&self, size: Option<&str>) -> Option<(u32, String)> {
        let Some(size) = size else {
            return self.topologies.first().map(|(chips, t)| (*chips, (*t).to_owned()));
        };
        if let Ok(n) = size.parse::<u32>() {
            let known = self.topologies.iter().find(|(chips, _)| chips * self.cores == n);
            return known.map(|(chips, t)| (*chips, (*t).to_owned()));
        }
        let sides: Option<Vec<u32>> =
            size.split('x').map(|s| s.parse().ok().filter(|n| (1..=64).contains(n))).collect();
        let sides = sides.filter(|s| s.len() == self.topologies[0].1.split('x').count())?;
        Some((sides.iter().product(), size.to_owned()))
    }

    /// Operations on bfloat16 that a device can do in a second.
    pub(crate) fn device_flops(&self) -> f64 {
        self.tflops * 1e12 / f64::from(self.devices)
    }

    /// Bytes that go to and from a device's memory in a second.
    pub(crate) fn device_bytes_per_s(&self) -> f64 {
        self.gb_per_s * 1e9 / f64::from(self.devices)
    }

    /// Bytes that a link to another chip carries in a second, in one direction: there are two along each axis.
    pub(crate) fn link_bytes_per_s(&self) -> f64 {
        let axes = self.topologies[0].1.split('x').count();
        self.ici_gb_per_s * 1e9 / 2.0 / (2 * axes) as f64
    }

    /// Whether the chips along a side of a slice are a ring: where it is as long as a pod's (16) on flat ones, and in
    /// slices of whole cubes of 4x4x4.
    pub(crate) fn wraps(&self, sides: &[u64], side: u64) -> bool {
        match sides.len() {
            2 => side == 16,
            _ => sides.iter().all(|n| n % 4 == 0),
        }
    }

    /// The names of its slices.
    pub(super) fn slices(&self) -> impl Iterator<Item = String> + '_ {
        let families = std::iter::once(&self.name).chain(self.also);
        families.flat_map(move |f| {
            self.topologies.iter().map(move |(chips, _)| format!("{f}-{}", chips * self.cores))
        })
    }
}

impl Gpu {
    /// How many times longer a product takes than one of bfloat16, of which it does so many in a second.
    ///
    /// A float32 product is done in TF32 unless its precision is the highest. Those of float64 are as slow, or slower.
    fn passes(&self, tflops: f64, dtype: DType, precision: Precision) -> f64 {
        match (dtype, precision) {
            (DType::F64 | DType::C128, _) | (DType::F32 | DType::C64, Precision::Highest) => {
                tflops / self.fp32
            }
            (DType::F32 | DType::C64, _) => tflops / self.tf32,
            (DType::S8 | DType::U8, _) => 0.5,
            (DType::F8E4M3FN | DType::F8E5M2, _) if self.arch.fp8 => 0.5,
            _ => 1.0,
        }
    }
}

/// How many passes of bfloat16 the matrix unit makes for a product.
pub(crate) fn passes(dtype: DType, precision: Precision) -> f64 {
    match (dtype, precision) {
        (DType::F32, Precision::Highest) => 6.0,
        (DType::F32, Precision::High) => 3.0,
        _ => 1.0,
    }
}
