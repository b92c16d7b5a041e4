//! Programs of several devices: which devices these are, and how their values are cut over them.

use crate::error::{Error, Result};
use crate::lanes::Lanes;
use oxitorch_hlo::{Mesh, Sharding, TensorType};
use oxitorch_pjrt::{Client, CompileOptions};
use std::sync::Arc;

/// How a value is cut over the devices of its stream; none: each of them, of which there is mostly one, has all of it.
pub(crate) type Sharded = Option<Arc<Sharding>>;

/// Whose a stream is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// What it has for the user: `tpu:0`.
    pub(crate) number: usize,
    /// The device's place in the client.
    pub(crate) at: usize,
    /// Of a mesh.
    pub(crate) devices: Option<Arc<Devices>>,
    /// What the engine's devices have in common.
    pub(crate) lanes: Lanes,
}

/// Devices of a client that run programs together.
#[derive(Debug)]
pub(crate) struct Devices {
    pub(crate) mesh: Arc<Mesh>,
    /// Each device has all of a value.
    pub(crate) copies: Arc<Sharding>,
    /// Each device has a part of its own along dimension 0.
    pub(crate) one_each: Arc<Sharding>,
    /// Their places in the client, in the order in which the mesh counts them.
    pub(crate) at: Vec<usize>,
    pub(crate) ids: Vec<i32>,
}

impl Devices {
    /// These devices of a client, as a mesh.
    pub(crate) fn new(client: &Client, mesh: Mesh, at: &[usize]) -> Result<Devices> {
        let (wanted, available) = (mesh.devices(), client.devices().len());
        if at.len() != wanted {
            return Err(Error::runtime(format!(
                "the mesh {mesh} has {wanted} devices, {} are named",
                at.len()
            )));
        }
        for (i, device) in at.iter().enumerate() {
            if *device >= available {
                return Err(Error::runtime(format!(
                    "tpu:{device} of a mesh is not one of {available} devices"
                )));
            }
            if at[..i].contains(device) {
                return Err(Error::runtime(format!("tpu:{device} is in the mesh {mesh} twice")));
            }
        }
        let mesh = Arc::new(mesh);
        Ok(Devices {
            copies: Arc::new(Sharding::replicated(&mesh)),
            one_each: Arc::new(Sharding::one_each(&mesh)),
            at: at.to_vec(),
            ids: at.iter().map(|&i| client.devices()[i].id()).collect(),
            mesh,
        })
    }

    /// One device of this process, and devices of others. Each has all of its own values.
    pub(crate) fn of_processes(device: usize, ids: &[i32]) -> Result<Devices> {
        let mesh = Mesh::new(&[("process", ids.len() as i64)]);
        let mesh = Arc::new(mesh.map_err(|e| Error::runtime(e.to_string()))?);
        Ok(Devices {
            copies: Arc::new(Sharding::replicated(&mesh)),
            one_each: Arc::new(Sharding::one_each(&mesh)),
            at: vec![device],
            ids: ids.to_vec(),
            mesh,
        })
    }

    /// The place of a device of the client among them.
    pub(crate) fn place(&self, device: usize) -> Option<usize> {
        self.at.iter().position(|&at| at == device)
    }

    /// What of a value of this type each device has.
    pub(crate) fn local(&self, ty: &TensorType, sharding: &Sharded) -> Result<TensorType> {
        match sharding {
            Some(sharding) => sharding.local(ty).map_err(|e| Error::runtime(e.to_string())),
            None => Ok(ty.clone()),
        }
    }
}

/// What a program of several devices is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// One program over whole values, which the compiler splits.
    Partitions,
    /// The same program on each device, over what that has.
    Replicas,
    /// That, and one of the devices is this stream's: of the others' values nothing is known here.
    Processes,
}

/// How a program is spread over several devices.
#[derive(Debug)]
pub(crate) struct Spread {
    pub(crate) devices: Arc<Devices>,
    pub(crate) how: How,
    pub(crate) inputs: Vec<Sharded>,
    pub(crate) outputs: Vec<Sharded>,
    /// What each device has of the inputs.
    pub(crate) params: Vec<TensorType>,
}

impl Spread {
    /// Of inputs with these types.
    pub(crate) fn new(
        devices: &Arc<Devices>,
        how: How,
        inputs: Vec<(TensorType, Sharded)>,
        outputs: Vec<Sharded>,
    ) -> Result<Arc<Spread>> {
        let params =
            inputs.iter().map(|(ty, sharding)| devices.local(ty, sharding)).collect::<Result<_>>()?;
        let inputs = inputs.into_iter().map(|(_, sharding)| sharding).collect();
        Ok(Arc::new(Spread { devices: devices.clone(), how, inputs, outputs, params }))
    }

    /// How an input or output is cut, in words for a compiler.
    pub(crate) fn sharding(&self, sharding: &Sharded) -> Arc<Sharding> {
        sharding.as_ref().unwrap_or(&self.devices.copies).clone()
    }

    /// Says to a compiler where the program runs.
    pub(crate) fn assign(&self, options: &mut CompileOptions) {
        options.device_ids.clone_from(&self.devices.ids);
        match self.how {
            How::Partitions => {
                (options.partitions, options.spmd, options.shardy) = (self.devices.ids.len(), true, true);
            }
            How::Replicas | How::Processes => options.replicas = self.devices.ids.len(),
        }
    }
}
