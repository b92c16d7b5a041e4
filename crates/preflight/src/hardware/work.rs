//! What programs have to do, and how long that takes at least: a roofline.

use serde::Serialize;

use super::chip::Chip;

/// What has to be done, and how long that takes at least.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Work {
    /// As the compiler counts them.
    pub(crate) flops: f64,
    /// Of matrix products and convolutions alone, counted from the program.
    pub(crate) product_flops: f64,
    /// To and from the device's memory, as the compiler estimates it.
    pub(crate) bytes_accessed: f64,
    /// FLOPs for each byte.
    pub(crate) intensity: f64,
    pub(crate) mxu_s: Option<f64>,
    pub(crate) hbm_s: Option<f64>,
    /// On the links between chips; not known where the work is not split.
    pub(crate) ici_s: Option<f64>,
    pub(crate) roofline_s: Option<f64>,
    /// `mxu`, `hbm` or `ici`.
    pub(crate) bound: Option<&'static str>,
    /// Share of the peak that no run can exceed.
    pub(crate) mfu_ceiling: Option<f64>,
}

/// What bounds a step, in words.
pub(crate) fn bound(of: &str, platform: &str) -> &'static str {
    match of {
        "mxu" if platform == "cuda" => "products",
        "mxu" => "the matrix unit",
        "ici" => "the links between chips",
        _ => "memory bandwidth",
    }
}

impl Work {
    /// FLOPs, of which the compiler's estimate may be less than what is counted of some.
    pub(crate) fn operations(&self) -> f64 {
        self.flops.max(self.product_flops)
    }

    pub(crate) fn add(&mut self, other: &Work, times: f64) {
        let sum = |a: Option<f64>, b: Option<f64>| Some(a.unwrap_or(0.0) + times * b?);
        self.flops += times * other.flops;
        self.product_flops += times * other.product_flops;
        self.bytes_accessed += times * other.bytes_accessed;
        self.mxu_s = sum(self.mxu_s, other.mxu_s);
        self.hbm_s = sum(self.hbm_s, other.hbm_s);
        self.ici_s = sum(self.ici_s, other.ici_s);
        self.roofline_s = sum(self.roofline_s, other.roofline_s);
    }

    /// What follows from the rest.
    pub(crate) fn finish(&mut self, chip: Option<&Chip>) {
        if self.bytes_accessed > 0.0 {
            self.intensity = self.flops / self.bytes_accessed;
        }
        self.bound = self.mxu_s.zip(self.hbm_s).map(|(mxu, hbm)| match self.ici_s {
            Some(ici) if ici > mxu.max(hbm) => "ici",
            _ if mxu > hbm => "mxu",
            _ => "hbm",
        });
        let share = |(c, s): (&Chip, f64)| self.product_flops / (s * c.device_flops());
        self.mfu_ceiling = chip.zip(self.roofline_s.filter(|s| *s > 0.0)).map(share);
    }
}
