//! What ops are recorded for: the devices of a plugin's client, or devices that are not there.

use crate::error::{Error, Result};
use oxitorch_pjrt::{self as pjrt, Platform};
use std::sync::Arc;

/// A device that is not there.
#[derive(Clone, Debug)]
pub struct AbsentDevice {
    /// The kind of hardware: what depends on it is recorded as for that.
    pub platform: Platform,
    /// Its name.
    pub kind: String,
    /// Its memory in bytes: windows are bounded by it, and it is not enforced.
    pub memory: u64,
    /// What the host reads from values that nobody has computed, in each element.
    pub reads_as: f64,
    /// Training steps after which nothing is of interest any more.
    pub steps: u64,
    /// Whether steps end where somebody marks it, and not with those of optimizers.
    pub marked: bool,
}

/// What ops are recorded for.
#[derive(Clone)]
pub enum Target {
    /// The devices of a client: programs are compiled and run.
    Client(Arc<pjrt::Client>),
    /// A device that is not there: programs are captured.
    Absent(AbsentDevice),
}

impl Target {
    /// The kind of hardware.
    pub fn platform(&self) -> pjrt::Platform {
        match self {
            Target::Client(client) => client.platform(),
            Target::Absent(device) => device.platform,
        }
    }

    /// How many devices there are.
    pub fn device_count(&self) -> usize {
        match self {
            Target::Client(client) => client.devices().len(),
            Target::Absent(_) => 1,
        }
    }

    /// The name of a device's kind.
    pub fn kind(&self, device: usize) -> String {
        match self {
            Target::Client(client) => client.devices()[device].kind().to_owned(),
            Target::Absent(device) => device.kind.clone(),
        }
    }

    /// Whether the devices are there.
    pub fn is_present(&self) -> bool {
        matches!(self, Target::Client(_))
    }

    /// The client; an error where the devices are not there.
    pub fn client(&self) -> Result<&Arc<pjrt::Client>> {
        match self {
            Target::Client(client) => Ok(client),
            Target::Absent(device) => {
                Err(Error::runtime(format!("nothing is computed for a {}: it is not there", device.kind)))
            }
        }
    }
}
