//! A mesh of devices, tensors on it and calls of its ops.

use std::sync::Arc;

use oxitorch_engine::{ArgRef, Call, Collective, Error, Mesh, Outputs, Refusal, Sharding, Slot, Stream};
use oxitorch_hlo::DType;

use super::{Returned, Rig, Tensor, error, int, op};

/// An engine with a mesh over some of its devices.
pub(crate) struct OnMesh {
    pub(crate) rig: Rig,
    pub(crate) mesh: Arc<Mesh>,
    /// The number of the mesh's stream.
    pub(crate) at: usize,
}

impl OnMesh {
    pub(crate) fn new(mut rig: Rig, axes: &[(&str, i64)], devices: &[usize]) -> OnMesh {
        let mesh = Mesh::new(axes).unwrap();
        let at = rig.engine.add_mesh(mesh.clone(), devices).unwrap();
        OnMesh { rig, mesh: Arc::new(mesh), at }
    }

    pub(crate) fn stream(&self) -> &Stream {
        self.rig.engine.stream(self.at).unwrap()
    }

    pub(crate) fn cut(&self, dims: &[&[&str]]) -> Arc<Sharding> {
        Arc::new(Sharding::new(&self.mesh, dims).unwrap())
    }

    /// A tensor that nobody has written.
    pub(crate) fn empty(&self, dtype: DType, sizes: &[i64]) -> Tensor {
        let tensor = Tensor::new(dtype, sizes);
        Tensor { slot: Arc::new(Slot::new(tensor.bytes(), self.at as u16)), ..tensor }
    }

    /// A tensor with these bytes, cut along axes.
    pub(crate) fn put(&self, dtype: DType, sizes: &[i64], dims: &[&[&str]], bytes: &[u8]) -> Tensor {
        let tensor = self.empty(dtype, sizes);
        let (site, mode) = (self.rig.site(), self.rig.engine.switches().mode);
        self.stream().write_sharded(&tensor.by_ref(), &self.cut(dims), bytes, site, mode).unwrap();
        tensor
    }

    pub(crate) fn floats(&self, sizes: &[i64], dims: &[&[&str]], values: &[f32]) -> Tensor {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.put(DType::F32, sizes, dims, &bytes)
    }

    pub(crate) fn call(&self, schema: &str, args: &[ArgRef<'_>]) -> Option<Tensor> {
        let rng = |_: Option<usize>, blocks: u64| (7, blocks);
        let (site, switches) = (self.rig.site(), self.rig.engine.switches());
        let device = self.at as u16;
        let call = Call { device, op: op(schema), args, rng: &rng, site, switches, size: None };
        let mut out = Outputs::new();
        self.rig.engine.dispatch(&call, &mut out).unwrap();
        match out.pop().map(Returned::from) {
            Some(Returned::New(tensor)) => Some(tensor),
            _ => None,
        }
    }

    pub(crate) fn unary(&self, schema: &str, x: &Tensor) -> Tensor {
        self.call(schema, &[x.arg()]).unwrap()
    }

    pub(crate) fn add(&self, x: &Tensor, y: &Tensor) -> Tensor {
        self.call(super::ADD, &[x.arg(), y.arg(), int(1)]).unwrap()
    }

    /// The same value, cut so.
    pub(crate) fn reshard(&self, x: &Tensor, dims: &[&[&str]]) -> Tensor {
        let result = self.empty(x.dtype, &x.sizes);
        let (site, mode) = (self.rig.site(), self.rig.engine.switches().mode);
        let to = self.cut(dims);
        self.stream().reshard(&x.by_ref(), &result.by_ref(), &to, site, mode).map_err(error).unwrap();
        result
    }

    pub(crate) fn collective(
        &self,
        what: &Collective,
        groups: &[Vec<i32>],
        x: &Tensor,
    ) -> Result<Tensor, Error> {
        collective(self.stream(), &self.rig, what, groups, x)
    }

    pub(crate) fn read(&self, tensor: &Tensor) -> Result<Vec<u8>, Error> {
        let mut out = vec![0; tensor.bytes()];
        self.stream().read_host(&tensor.by_ref(), &mut out, self.rig.site()).map_err(error)?;
        Ok(out)
    }

    pub(crate) fn read_floats(&self, tensor: &Tensor) -> Vec<f32> {
        let bytes = self.read(tensor).unwrap();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Bytes in use on each device of the engine.
    pub(crate) fn bytes(&self) -> Vec<u64> {
        self.stream().settled_memory(self.rig.site()).unwrap();
        let bytes = |i| self.rig.engine.stream(i).unwrap().memory().bytes().current;
        (0..self.rig.engine.device_count()).map(bytes).collect()
    }
}

/// A collective on any stream.
pub(crate) fn collective(
    stream: &Stream,
    rig: &Rig,
    what: &Collective,
    groups: &[Vec<i32>],
    x: &Tensor,
) -> Result<Tensor, Error> {
    let mode = rig.engine.switches().mode;
    let refused: fn(Refusal) -> Error = error;
    let (slot, ty) = stream.collective(what, groups, &x.by_ref(), rig.site(), mode).map_err(refused)?;
    Ok(Tensor { slot: Arc::new(slot), ..Tensor::new(ty.dtype, &ty.shape) })
}
