//! What ops are recorded for: the devices of a plugin's client, or devices that are not there.

use crate::absent::Absent;
use crate::error::{Error, Result};
use oxitorch_pjrt as pjrt;
use std::sync::Arc;

/// What ops are recorded for.
#[derive(Clone)]
pub enum Target {
    /// The devices of a client: programs are compiled and run.
    Client(Arc<pjrt::Client>),
    /// Devices that are not there: programs are captured.
    Absent(Arc<Absent>),
}

impl Target {
    /// The kind of hardware.
    pub fn platform(&self) -> pjrt::Platform {
        match self {
            Target::Client(client) => client.platform(),
            Target::Absent(absent) => absent.device.platform,
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
            Target::Absent(absent) => absent.device.kind.clone(),
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
            Target::Absent(absent) => Err(Error::runtime(format!(
                "nothing is computed for a {}: it is not there",
                absent.device.kind
            ))),
        }
    }

    /// The devices that are not there.
    pub(crate) fn absent(&self) -> Option<&Arc<Absent>> {
        match self {
            Target::Client(_) => None,
            Target::Absent(absent) => Some(absent),
        }
    }
}
