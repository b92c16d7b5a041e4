//! The stream's methods for several devices: values that are cut over a mesh, and collectives.
//!
//! On the stream of a mesh ops are recorded on whole values. How a result is cut follows from its op: where somebody asked
//! for it so ([`Stream::reshard`]) and after collectives it is cut, and of all other results each device has a copy. The
//! compiler splits the program and puts in what devices send each other for that.
//!
//! A collective is recorded for its members as PyTorch's processes know it: each has a tensor of its own. On a mesh these
//! are the parts of one value along dimension 0.

use crate::collective::Exchange;
use crate::config::Mode;
use crate::error::{Error, Refusal, Result};
use crate::events;
use crate::executor::Asked;
use crate::inst::Kind;
use crate::ops::Ops;
use crate::part::Part;
use crate::site::Site;
use crate::spread::{How, Sharded, Spread};
use crate::stream::Stream;
use crate::target::Target;
use crate::tensor::TensorRef;
use crate::threads::Whose;
use crate::value::{Held, Slot, State, Value};
use oxitorch_capture::{Collective, Reason};
use oxitorch_hlo::{ReplicaGroups, Sharding, TensorType};
use std::sync::Arc;

impl Stream {
    /// Copies row-major host memory into a device tensor, of which each device gets its part.
    pub fn write_sharded(
        &self,
        tensor: &TensorRef<'_>,
        sharding: &Arc<Sharding>,
        bytes: &[u8],
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        let sharding = self.sharded(sharding, &tensor.ty()?)?;
        self.write_value(tensor, sharding, bytes, site, mode)
    }

    /// Makes a tensor of the mesh show another one, cut so.
    pub fn reshard(
        &self,
        src: &TensorRef<'_>,
        dst: &TensorRef<'_>,
        sharding: &Arc<Sharding>,
        site: Site,
        mode: Mode,
    ) -> Result<(), Refusal> {
        self.sharded(sharding, &src.ty()?)?;
        let mut w = self.lock(site);
        let value = w.read(src.device()?, src)?;
        let value = w.reshard(value, sharding)?;
        w.write(dst.device()?, dst, value)?;
        self.end_call(&mut w, mode)?;
        drop(w);
        Ok(self.after_op(mode)?)
    }

    /// How a value is cut that has this sharding; an error if it cannot be, or not on this stream.
    fn sharded(&self, sharding: &Arc<Sharding>, ty: &TensorType) -> Result<Sharded> {
        let own = self.devices.as_ref().filter(|d| d.mesh == *sharding.mesh());
        let Some(devices) = own else {
            return Err(Error::runtime(format!("tpu:{} is not the mesh of {sharding}", self.device)));
        };
        let sharding = Some(sharding.clone()).filter(|s| !s.is_replicated());
        devices.local(ty, &sharding)?;
        Ok(sharding)
    }

    /// How a program for a part is spread over the devices of the mesh.
    pub(crate) fn spread(&self, part: &Part, inputs: &[TensorType]) -> Result<Option<Arc<Spread>>> {
        let Some(devices) = &self.devices else { return Ok(None) };
        let how = if part.asked.is_some() { How::Replicas } else { How::Partitions };
        let shardings = part.inputs.iter().map(|v| v.sharding.clone()).chain(std::iter::repeat(None));
        let inputs = inputs.iter().cloned().zip(shardings).collect();
        let outputs = part.outputs.iter().map(|v| v.sharding.clone()).collect();
        Spread::new(devices, how, inputs, outputs).map(Some)
    }

    /// Records a collective of groups of devices, which are named by their ids. It ends what was recorded, is a launch of
    /// its own in its place of the stream, and waits for nothing. Gives each member's result, on a mesh all of them along
    /// dimension 0.
    pub fn collective(
        &self,
        what: &Collective,
        groups: &[Vec<i32>],
        x: &TensorRef<'_>,
        site: Site,
        mode: Mode,
    ) -> Result<(Slot, TensorType), Refusal> {
        events::here(site);
        let named = |e: Error| Error::new(e.kind, format!("{}: {}", what.name(), e.message));
        let groups_here = self.members(groups).map_err(named)?;
        let one_each = self.devices.as_ref().map(|d| d.one_each.clone());
        let count = self.devices.as_ref().map_or(1, |d| d.ids.len() as i64);
        let ty = of_each(&x.ty()?, count).map_err(named)?;
        let exchange = Arc::new(Exchange { what: what.clone(), ty, groups: groups_here });
        let (slot, ty) = {
            let mut w = self.lock(site);
            w.spoil();
            let mut value = w.read(x.device()?, x)?;
            if let Some(sharding) = &one_each {
                value = w.reshard(value, sharding)?;
            }
            let inst = w.instances.get(Kind::Collective(exchange.clone()))?;
            let out = inst.outputs.first().and_then(Option::as_ref);
            let out = out.ok_or_else(|| named(Error::runtime("no result; please report this")))?;
            self.refuse_huge(&inst)?;
            let held = Held::new(value);
            self.flush(&mut w, Reason::Collective)?;
            if w.is_recorded(held.value()) {
                self.flush_for(&mut w, &Whose::Value(held.value()), Reason::Collective)?; // another thread's
            }
            let all = of_all(&out.stored, count);
            let result =
                Value::sharded(all.clone(), one_each.filter(|s| !s.is_replicated()), State::Pending, site);
            let done = w.exchanges.entry(groups.into()).or_default();
            let asked = Asked { exchange, groups: groups.into(), number: *done };
            *done += 1;
            let slot = Slot::with(result.whole_bytes() as usize, self.device, result.clone());
            let ops =
                Ops { insts: vec![inst.clone()], sites: vec![site], operands: vec![0], offsets: vec![] };
            let mut part = Part::of_collective(ops, held.value().clone(), result, asked);
            drop(held); // what nobody else sees may be overwritten
            self.launch_window(&mut w, &mut part, &[], Reason::Collective)?;
            (slot, all)
        };
        self.after_op(mode)?;
        Ok((slot, ty))
    }

    /// The members of groups by their places among the devices of this stream. A client whose devices are all here waits
    /// for nobody else: devices that are missing would make its plugin wait, and abort.
    fn members(&self, groups: &[Vec<i32>]) -> Result<ReplicaGroups> {
        let ids: Vec<i32> = match (&self.devices, self.target()) {
            (Some(devices), _) => devices.ids.clone(),
            (None, Target::Client(client)) => {
                client.devices().get(usize::from(self.device)).map(|d| d.id()).into_iter().collect()
            }
            // The others of its group are not there either.
            (None, Target::Absent(_)) => groups.concat(),
        };
        let place = |id: &i32| {
            let place = ids.iter().position(|own| own == id).map(|at| at as i64);
            place.ok_or_else(|| Error::runtime(format!("device {id} takes no part in tpu:{}", self.device)))
        };
        let group = |group: &Vec<i32>| group.iter().map(place).collect::<Result<Vec<i64>>>();
        let groups = groups.iter().map(group).collect::<Result<Vec<_>>>()?;
        let members = ReplicaGroups::new(groups).map_err(|e| Error::runtime(e.to_string()))?;
        match ids.len() - members.replicas() {
            0 => Ok(members),
            n => Err(Error::runtime(format!(
                "{n} of {} devices are in no group: all have to take part",
                ids.len()
            ))),
        }
    }
}

/// What each of so many devices has of a tensor along dimension 0.
fn of_each(ty: &TensorType, devices: i64) -> Result<TensorType> {
    let mut ty = ty.clone();
    match ty.shape.first_mut() {
        None if devices == 1 => {}
        Some(size) if *size % devices == 0 => *size /= devices,
        _ => {
            let words = format!("dimension 0 of {ty} is not {devices} equal parts, one for each device");
            return Err(Error::runtime(words));
        }
    }
    Ok(ty)
}

/// What so many devices have together.
fn of_all(ty: &TensorType, devices: i64) -> TensorType {
    let mut ty = ty.clone();
    ty.shape.iter_mut().take(1).for_each(|size| *size *= devices);
    ty
}
