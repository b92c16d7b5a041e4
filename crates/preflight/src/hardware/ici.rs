//! How long collectives take on the links between the chips of a slice.

use oxitorch_capture::GroupCall;
use oxitorch_pjrt::Collective;
use serde::{Deserialize, Serialize};

use super::chip::Chip;
use super::gpus;
use super::slices::Slice;

/// Collectives of one kind on tensors of the same types between the same devices, of one launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// XLA's name.
    pub(crate) kind: String,
    /// What each device puts in.
    pub(crate) operands: String,
    /// What a device has before or after one of them, whichever is more.
    pub(crate) bytes: u64,
    /// How many a launch has.
    pub(crate) count: u64,
    /// Devices that take part in one.
    pub(crate) devices: u64,
    /// The first devices that do; not in the report.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) group: Vec<u64>,
    /// Of all of them, at least.
    #[serde(default)]
    pub(crate) ici_s: Option<f64>,
}

/// What XLA calls the collectives of `torch.distributed`, by how they begin; a reduction to one and what is like it have no
/// name there.
const KINDS: &[(&str, &str)] = &[
    ("all_reduce", "all-reduce"),
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("all_to_all", "all-to-all"),
    ("broadcast", "collective-broadcast"),
    ("send", "collective-permute"),
    ("recv", "collective-permute"),
];

impl From<&GroupCall> for Sent {
    fn from(c: &GroupCall) -> Sent {
        let kind = KINDS.iter().find(|(name, _)| c.name.starts_with(name)).map_or(&*c.name, |(_, kind)| kind);
        Sent {
            kind: kind.to_owned(),
            operands: c.r#type.as_ref().map_or_else(String::new, ToString::to_string),
            bytes: c.bytes,
            count: 1,
            devices: c.ranks.len() as u64,
            group: c.ranks.clone(),
            ici_s: None,
        }
    }
}

impl From<Collective> for Sent {
    fn from(c: Collective) -> Sent {
        Sent {
            kind: c.kind.name().to_owned(),
            operands: c.operands,
            bytes: c.bytes,
            count: c.count,
            devices: c.group.len() as u64,
            group: c.group,
            ici_s: None,
        }
    }
}

/// Collectives of a step together.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Total {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    /// None if it is not known of one of them.
    pub(crate) ici_s: Option<f64>,
}

impl Sent {
    /// With the time that all of them take at least, and without what only that is computed from.
    pub(crate) fn timed(&self, slice: &Slice) -> Sent {
        let seconds = slice.place.as_ref().map(|(chip, topology)| self.seconds(chip, topology));
        Sent { ici_s: seconds, group: Vec::new(), ..self.clone() }
    }

    /// The time of a ring or line along each axis of the torus on which the group lies, all of them used at once: of a
    /// tensor of V bytes between n devices that send W bytes a second in all, an all-gather or a reduce-scatter takes
    /// V (n - 1) / n / W, an all-reduce, which is both, twice that, an all-to-all of v bytes on each device n v / 4 / W,
    /// and a permutation v by one link. What begins late, and each hop's latency, are not in it.
    ///
    /// Source: Austin et al., How to Scale Your Model, "Sharded Matrices and How to Multiply Them"
    /// (jax-ml.github.io/scaling-book/sharding), which leaves out the factor (n - 1) / n.
    fn seconds(&self, chip: &Chip, topology: &str) -> f64 {
        if chip.gpu.is_some() {
            return gpus::seconds(chip, &self.kind, self.bytes, self.devices) * self.count as f64;
        }
        let place = Group::new(chip, topology, &self.group);
        let (v, n) = (self.bytes as f64, place.chips as f64);
        if place.chips < 2 || place.bytes_per_s <= 0.0 {
            return 0.0; // the devices of a chip share its memory
        }
        let moved = v * (n - 1.0) / n / place.bytes_per_s;
        let one = match self.kind.as_str() {
            "all-reduce" => 2.0 * moved,
            "all-to-all" => v * n / 4.0 / place.bytes_per_s,
            "collective-permute" | "collective-broadcast" => v / chip.link_bytes_per_s(),
            _ => moved,
        };
        one * self.count as f64
    }
}

/// Where in the torus a group of devices lies.
struct Group {
    /// Chips on which it has devices.
    chips: u64,
    /// What a device of it sends in a second, along all axes.
    bytes_per_s: f64,
}

impl Group {
    fn new(chip: &Chip, topology: &str, group: &[u64]) -> Group {
        let sides = sides(topology);
        let on_chip = u64::from(chip.devices);
        let mut chips: Vec<u64> = group.iter().map(|d| d / on_chip).collect();
        chips.sort_unstable();
        chips.dedup();
        let mut links = 0.0;
        let mut stride = 1;
        for &side in &sides {
            let mut at: Vec<u64> = chips.iter().map(|c| c / stride % side).collect();
            at.sort_unstable();
            at.dedup();
            // A ring is used in both directions; along a line, the chip at its end has one link.
            let is_ring = at.len() as u64 == side && chip.wraps(&sides, side);
            links += match (at.len(), is_ring) {
                (0 | 1, _) => 0.0,
                (_, true) => 2.0,
                (_, false) => 1.0,
            };
            stride *= side;
        }
        // The devices of a chip that are in other groups send at the same time.
        let share = group.len() as f64 / (chips.len().max(1) as u64 * on_chip) as f64;
        Group { chips: chips.len() as u64, bytes_per_s: links * chip.link_bytes_per_s() * share }
    }
}

fn sides(topology: &str) -> Vec<u64> {
    let (_, sizes) = topology.split_once(':').unwrap_or(("", topology));
    sizes.split('x').filter_map(|n| n.parse().ok()).collect()
}

/// The totals of so many launches by what they have in common, the longest first, and where that is not known those of
/// most bytes.
pub(crate) fn totals<'a, K: PartialEq>(all: impl Iterator<Item = (K, &'a Sent, u64)>) -> Vec<(K, Total)> {
    let mut totals: Vec<(K, Total)> = Vec::new();
    for (common, sent, launches) in all.filter(|(.., launches)| *launches > 0) {
        let at = totals.iter().position(|(of, _)| *of == common).unwrap_or_else(|| {
            totals.push((common, Total { ici_s: Some(0.0), ..Total::default() }));
            totals.len() - 1
        });
        let total = &mut totals[at].1;
        total.count += sent.count * launches;
        total.bytes += sent.bytes * sent.count * launches;
        total.ici_s = total.ici_s.zip(sent.ici_s).map(|(a, b)| a + b * launches as f64);
    }
    let size = |total: &Total| (total.ici_s, total.bytes);
    totals.sort_by(|(_, a), (_, b)| size(b).partial_cmp(&size(a)).unwrap_or(std::cmp::Ordering::Equal));
    totals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(slice: &str, kind: &str, group: &[u64]) -> f64 {
        let sent = Sent {
            kind: kind.to_owned(),
            operands: String::new(),
            bytes: 1_000_000_000,
            count: 1,
            devices: group.len() as u64,
            group: group.to_vec(),
            ici_s: None,
        };
        sent.timed(&Slice::parse(slice).unwrap()).ici_s.unwrap()
    }

    fn all(n: u64) -> Vec<u64> {
        (0..n).collect()
    }

    #[test]
    fn times_are_those_of_rings_and_lines() {
        // A link of a v5e chip: 50 GB/s in each direction.
        for (slice, kind, group, expected) in [
            ("v5e-4", "all-gather", all(4), 0.75 / 100.0), // two lines of two
            ("v5e-4", "all-reduce", all(4), 1.5 / 100.0),
            ("v5e-4", "all-gather", vec![0, 1], 0.5 / 50.0),
            ("v5e-8", "reduce-scatter", all(8), 0.875 / 100.0),
            ("v5e-256", "all-gather", all(256), 255.0 / 256.0 / 200.0), // two rings
            ("v5e-256", "all-gather", all(16), 15.0 / 16.0 / 100.0),    // one
            ("v5e-256", "all-to-all", all(16), 16.0 / 4.0 / 100.0),
            ("v5e-4", "collective-permute", vec![0, 1], 1.0 / 50.0),
            ("v5p-128", "all-gather", all(64), 63.0 / 64.0 / 600.0), // three rings of 100 GB/s links
            ("v5p-32", "all-gather", all(16), 15.0 / 16.0 / 300.0),  // three lines
            // Two devices on a chip: a group of one of each has half of the links, the two of one chip need none.
            ("tpu7x-8", "all-gather", all(8), 0.75 / 200.0),
            ("tpu7x-8", "all-gather", vec![0, 2, 4, 6], 0.75 / 100.0),
            ("tpu7x-8", "all-gather", vec![0, 1], 0.0),
        ] {
            let found = seconds(slice, kind, &group);
            assert!((found - expected).abs() < 1e-9, "{slice} {kind} {group:?}: {found} {expected}");
        }
    }

    #[test]
    fn totals_are_by_what_collectives_have_in_common() {
        let sent = |kind: &str, s| Sent {
            kind: kind.into(),
            operands: String::new(),
            bytes: 10,
            count: 3,
            devices: 4,
            group: vec![],
            ici_s: Some(s),
        };
        let (a, b, c) = (sent("all-gather", 1.0), sent("all-reduce", 4.0), sent("all-gather", 2.0));
        let sums = totals([(&a, 1), (&b, 1), (&c, 2)].map(|(s, n)| (&*s.kind, s, n)).into_iter());
        let told: Vec<_> = sums.iter().map(|(kind, t)| (*kind, t.count, t.bytes, t.ici_s)).collect();
        assert_eq!(told, [("all-gather", 9, 90, Some(5.0)), ("all-reduce", 3, 30, Some(4.0))]);
    }
}
