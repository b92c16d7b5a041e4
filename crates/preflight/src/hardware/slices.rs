//! The slices of chips that people name, and what their chips can do: one table for TPUs, which `docs/preflight.md` shows;
//! that of GPUs is in gpus.rs.

use std::fmt::Write;

use anyhow::bail;
use oxitorch_pjrt::Platform;

use super::chip::{Chip, PREFIX};
use super::gpus::{self, GPUS};

const FLAT: &[(u32, &str)] = &[
    (1, "1x1"),
    (4, "2x2"),
    (8, "2x4"),
    (16, "4x4"),
    (32, "4x8"),
    (64, "8x8"),
    (128, "8x16"),
    (256, "16x16"),
];
const BOARDS: &[(u32, &str)] = &[
    (4, "2x2"),
    (16, "4x4"),
    (32, "4x8"),
    (64, "8x8"),
    (128, "8x16"),
    (256, "16x16"),
    (512, "16x32"),
    (1024, "32x32"),
];
const CUBES: &[(u32, &str)] = &[
    (4, "2x2x1"),
    (8, "2x2x2"),
    (16, "2x2x4"),
    (32, "2x4x4"),
    (64, "4x4x4"),
    (128, "4x4x8"),
    (256, "4x8x8"),
    (512, "8x8x8"),
];

/// All of them, oldest first.
pub(crate) const CHIPS: &[Chip] = &[
    Chip {
        name: "v3",
        also: &[],
        kind: "TPU v3",
        cores: 2,
        devices: 2,
        device_memory: 16_624_107_520,
        tflops: 123.0,
        gb_per_s: 900.0,
        mxu: 128,
        ici_gb_per_s: 664.0,
        topologies: BOARDS,
        gpu: None,
    },
    Chip {
        name: "v4",
        also: &[],
        kind: "TPU v4",
        cores: 2,
        devices: 2,
        device_memory: 32_745_971_712,
        tflops: 275.0,
        gb_per_s: 1200.0,
        mxu: 128,
        ici_gb_per_s: 540.0,
        topologies: CUBES,
        gpu: None,
    },
    Chip {
        name: "v5e",
        also: &["v5litepod", "v5lite"],
        kind: "TPU v5 lite",
        cores: 1,
        devices: 1,
        device_memory: 16_909_336_064,
        tflops: 197.0,
        gb_per_s: 819.0,
        mxu: 128,
        ici_gb_per_s: 400.0,
        topologies: FLAT,
        gpu: None,
    },
    Chip {
        name: "v5p",
        also: &[],
        kind: "TPU v5",
        cores: 2,
        devices: 1,
        device_memory: 102_786_660_352,
        tflops: 459.0,
        gb_per_s: 2765.0,
        mxu: 128,
        ici_gb_per_s: 1200.0,
        topologies: CUBES,
        gpu: None,
    },
    Chip {
        name: "v6e",
        also: &["trillium"],
        kind: "TPU v6 lite",
        cores: 1,
        devices: 1,
        device_memory: 33_546_042_880,
        tflops: 918.0,
        gb_per_s: 1638.0,
        mxu: 256,
        ici_gb_per_s: 800.0,
        topologies: FLAT,
        gpu: None,
    },
    Chip {
        name: "tpu7x",
        also: &["v7x", "ironwood"],
        kind: "TPU7x",
        cores: 2,
        devices: 2,
        device_memory: 101_724_450_816,
        tflops: 2307.0,
        gb_per_s: 7380.0,
        mxu: 256,
        ici_gb_per_s: 1200.0,
        topologies: CUBES,
        gpu: None,
    },
];

/// What to compile for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Slice {
    /// As the user wrote it.
    pub(crate) name: String,
    /// The chip, and the topology's name; none for the processor of this machine.
    pub(crate) place: Option<(&'static Chip, String)>,
    pub(crate) chips: u32,
}

impl Slice {
    /// Finds a slice by a name that people use: `v5e-8`, `v5litepod-8`, `v4-8`, `v5e:2x4`, `trillium`, `cuda:h200-8`, `cpu`.
    pub(crate) fn parse(name: &str) -> anyhow::Result<Slice> {
        let lower = name.to_ascii_lowercase();
        if lower == "cpu" {
            return Ok(Slice { name: name.to_owned(), place: None, chips: 1 });
        }
        let made = |(chip, chips, topology): (&'static Chip, u32, &str)| {
            let place = Some((chip, format!("{}:{topology}", chip.name)));
            Slice { name: name.to_owned(), place, chips }
        };
        if let Some(gpu) = lower.strip_prefix(PREFIX) {
            let Some(found) = gpus::parse(gpu) else { bail!(unknown(name, &lower, None)) };
            return Ok(made(found));
        }
        let (family, size) = match lower.split_once([':', '-']) {
            Some((family, size)) => (family, Some(size)),
            None => (lower.as_str(), None),
        };
        let chip = CHIPS.iter().find(|c| c.name == family || c.also.contains(&family));
        let found = chip.and_then(|chip| Some((chip, chip.topology(size)?)));
        let Some((chip, (chips, topology))) = found else { bail!(unknown(name, &lower, chip)) };
        Ok(made((chip, chips, &topology)))
    }

    /// Devices in it.
    pub(crate) fn devices(&self) -> u64 {
        u64::from(self.chips) * self.chip().map_or(1, |c| u64::from(c.devices))
    }

    /// Chips of so many of its devices.
    pub(crate) fn chips_of(&self, devices: u64) -> u32 {
        let on_chip = self.chip().map_or(devices, |c| u64::from(c.devices)).max(1);
        u32::try_from(devices.div_ceil(on_chip)).unwrap_or(self.chips).min(self.chips)
    }

    /// The platform that compiles for it.
    pub(crate) fn platform(&self) -> Platform {
        match self.chip() {
            Some(chip) if chip.gpu.is_some() => Platform::Cuda,
            Some(_) => Platform::Tpu,
            None => Platform::Cpu,
        }
    }

    /// The plugin's name of the topology.
    pub(crate) fn topology(&self) -> Option<&str> {
        self.place.as_ref().map(|(_, topology)| topology.as_str())
    }

    pub(crate) fn chip(&self) -> Option<&'static Chip> {
        self.place.as_ref().map(|(chip, _)| *chip)
    }
}

/// The chip of that name.
pub(crate) fn named(name: &str) -> Option<&'static Chip> {
    CHIPS.iter().chain(GPUS).find(|c| c.name == name || c.also.contains(&name))
}

fn unknown(name: &str, lower: &str, chip: Option<&Chip>) -> String {
    let mut names: Vec<String> =
        CHIPS.iter().flat_map(Chip::slices).chain(GPUS.iter().flat_map(gpus::names)).collect();
    names.push("cpu".to_owned());
    // Whoever writes `h200` means `cuda:h200`.
    let bare = |n: &str| distance(n.strip_prefix(PREFIX).unwrap_or(n), lower);
    names.sort_by_key(|n| distance(n, lower).min(bare(n)));
    let mut out = format!("slice `{name}` is unknown; the nearest names are {}", names[..4].join(", "));
    let chips: Vec<&str> = CHIPS.iter().map(|c| c.name).collect();
    let _ = match chip {
        Some(chip) => write!(out, "; a topology is written as {}:{}", chip.name, chip.topologies[0].1),
        None => {
            let named: Vec<&str> = GPUS.iter().map(|c| c.name).collect();
            write!(out, "; chips are {}, and {} with {}", chips.join(", "), PREFIX, named.join(", "))
        }
    };
    out
}

/// How many letters have to be changed, put in or left out.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_that_people_use() {
        for (name, topology, chips) in [
            ("v5e-1", "v5e:1x1", 1),
            ("v5e-8", "v5e:2x4", 8),
            ("v5litepod-8", "v5e:2x4", 8),
            ("v5e:2x4", "v5e:2x4", 8),
            ("V6E-4", "v6e:2x2", 4),
            ("trillium", "v6e:1x1", 1),
            ("trillium-256", "v6e:16x16", 256),
            // Named by their cores, of which a chip has two.
            ("v3-32", "v3:4x4", 16),
            ("v4-8", "v4:2x2x1", 4),
            ("v5p-16", "v5p:2x2x2", 8),
            ("tpu7x-8", "tpu7x:2x2x1", 4),
            ("ironwood", "tpu7x:2x2x1", 4),
        ] {
            let slice = Slice::parse(name).unwrap();
            assert_eq!((slice.topology(), slice.chips), (Some(topology), chips), "{name}");
        }
        assert_eq!(Slice::parse("cpu").unwrap().platform(), Platform::Cpu);
        let gpus = Slice::parse("CUDA:H200-8").unwrap();
        assert_eq!((gpus.topology(), gpus.chips, gpus.devices()), (Some("h200:1x1x8"), 8, 8));
        assert_eq!(
            (gpus.platform(), gpus.chip().unwrap().slice_name(8)),
            (Platform::Cuda, "cuda:h200-8".into())
        );
    }

    #[test]
    fn the_documentation_has_this_table() {
        let page = include_str!("../../../../docs/preflight.md");
        for c in CHIPS {
            let slices: Vec<String> =
                c.topologies.iter().map(|(n, t)| format!("{}-{} {t}", c.name, n * c.cores)).collect();
            let also = c.also.join(", ");
            let (name, cores, devices, memory) = (c.name, c.cores, c.devices, c.device_memory);
            let numbers = format!(
                "{cores} | {devices} | {} | {} | {} | {memory}",
                c.tflops, c.gb_per_s, c.ici_gb_per_s
            );
            let row =
                format!("| {name} | {also} | {numbers} | {} |", slices.join(", ")).replace("|  |", "| |");
            assert!(page.contains(&row), "docs/preflight.md lacks\n{row}");
        }
    }

    #[test]
    fn unknown_names_have_neighbours() {
        for (name, near) in
            [("v5e-3", "v5e-1"), ("v5-8", "v5e-8"), ("v6-4", "v6e-4"), ("trilium-8", "trillium-8")]
        {
            let message = Slice::parse(name).unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}` is unknown")) && message.contains(near), "{message}");
        }
        for (name, near) in [
            ("h200", "cuda:h200"),
            ("cuda:h20", "cuda:h200"),
            ("cuda:h200x8", "cuda:h200-8"),
            ("cuda:", "cuda:l4"),
        ] {
            let message = Slice::parse(name).unwrap_err().to_string();
            assert!(message.contains(&format!("nearest names are {near},")), "{message}");
        }
        for name in ["", "v5e-", "v5e:2x", "v5e:0x1", "v5e:2x2x2", "v4:2x2", "abacus"] {
            assert!(Slice::parse(name).is_err(), "{name}");
        }
    }
}
