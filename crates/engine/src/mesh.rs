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
use crate::ending::Ending;
use crate::error::{Error, Refusal, Result};
use crate::events;
use crate::executor::{Agreement, Asked};
use crate::inst::Kind;
use crate::ops::Ops;
use crate::part::Part;
use crate::site::Site;
use crate::spread::{Devices, How, Sharded, Spread};
use crate::stream::Stream;
use crate::target::Target;
use crate::tensor::TensorRef;
use crate::threads::Whose;
use crate::value::{Held, Slot, State, Value};
use crate::window::Window;
use crate::work::{About, Group};
use oxitorch_capture::Collective;
use oxitorch_hlo::{ReplicaGroups, Sharding, TensorType};
use oxitorch_pjrt::Client;
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
        let others = part.asked.as_ref().map(|a| &a.exchange.devices).filter(|ids| !ids.is_empty());
        let (devices, how) = match (&self.devices, others) {
            (Some(devices), _) if part.asked.is_some() => (devices.clone(), How::Replicas),
            (Some(devices), _) => (devices.clone(), How::Partitions),
            (None, Some(ids)) => (Arc::new(Devices::of_processes(self.at, ids)?), How::Processes),
            (None, None) => return Ok(None),
        };
        let shardings = part.inputs.iter().map(|v| v.sharding.clone()).chain(std::iter::repeat(None));
        let inputs = inputs.iter().cloned().zip(shardings).collect();
        let outputs = part.outputs.iter().map(|v| v.sharding.clone()).collect();
        Spread::new(&devices, how, inputs, outputs).map(Some)
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
        let (slot, ty) = {
            let mut w = self.lock(site);
            w.leave("a collective")?;
            let exchange = self.exchange(&mut w, what, groups, x)?;
            let result = self.exchanged(&exchange, site);
            self.launch_exchange(&mut w, exchange, &result, None, site, |_| Ok(()))?;
            let ty = result.ty.clone();
            (Slot::with(result.whole_bytes() as usize, self.device, result), ty)
        };
        self.after_op(mode)?;
        Ok((slot, ty))
    }

    /// A collective of a tensor, which is not recorded yet.
    pub(crate) fn exchange(
        &self,
        w: &mut Window,
        what: &Collective,
        groups: &[Vec<i32>],
        x: &TensorRef<'_>,
    ) -> Result<Exchanged, Refusal> {
        let named = |e: Error| Error::new(e.kind, format!("{}: {}", what.name(), e.message));
        let (groups_here, devices) = self.members(groups).map_err(named)?;
        let one_each = self.devices.as_ref().map(|d| d.one_each.clone());
        let count = self.devices.as_ref().map_or(1, |d| d.ids.len() as i64);
        let ty = of_each(&x.ty()?, count).map_err(named)?;
        let exchange = Arc::new(Exchange { what: what.clone(), ty, groups: groups_here, devices });
        let mut value = w.read(x.device()?, x)?;
        if let Some(sharding) = &one_each {
            value = w.reshard(value, sharding)?;
        }
        let inst = w.instances.get(Kind::Collective(exchange.clone()))?;
        let out = inst.outputs.first().and_then(Option::as_ref);
        let out = out.ok_or_else(|| named(Error::runtime("no result; please report this")))?;
        self.refuse_huge(&inst)?;
        let result = of_all(&out.stored, count);
        Ok(Exchanged { exchange, groups: groups.into(), value: Held::new(value), result })
    }

    /// The value that a collective gives.
    pub(crate) fn exchanged(&self, exchange: &Exchanged, site: Site) -> Arc<Value> {
        let one_each = self.devices.as_ref().map(|d| d.one_each.clone());
        let sharding = one_each.filter(|s| !s.is_replicated());
        Value::sharded(exchange.result.clone(), sharding, State::Pending, site)
    }

    /// Launches a collective in its place of the stream; `bind` shows its result to who is to have it.
    pub(crate) fn launch_exchange(
        &self,
        w: &mut Window,
        Exchanged { exchange, groups, value: held, result: all }: Exchanged,
        result: &Arc<Value>,
        agreement: Option<Arc<Agreement>>,
        site: Site,
        bind: impl FnOnce(&mut Window) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let inst = w.instances.get(Kind::Collective(exchange.clone()))?;
        let number = w.exchanges.get(&groups).copied().unwrap_or_default();
        let work = agreement.as_ref().map(|a| a.work.clone());
        // Devices of one process have no name for a group.
        let unnamed = || {
            let group = Group { name: format!("{groups:?}"), ..Group::default() };
            About { name: exchange.what.name(), group: group.into(), number: number + 1 }
        };
        let which = || work.as_ref().map_or_else(unnamed, |w| w.about().clone()).which(std::iter::once(&all));
        let ending = Ending::collective(&which);
        self.flush(w, ending)?;
        if w.is_recorded(held.value()) {
            self.flush_for(w, &Whose::Value(held.value()), ending)?; // another thread's
        }
        bind(w)?;
        w.exchanges.insert(groups.clone(), number + 1);
        let asked = Asked { exchange: exchange.clone(), groups: groups.clone(), number, agreement };
        let ops = Ops { insts: vec![inst.clone()], sites: vec![site], operands: vec![0], offsets: vec![] };
        let mut part = Part::of_collective(ops, held.value().clone(), result.clone(), asked);
        drop(held); // what nobody else sees may be overwritten
        Ok(self.launch_window(w, &mut part, &[], ending)?)
    }

    /// The members of groups by their places among the devices of the program; and these, if some are of other processes.
    /// A client whose devices are all here waits for nobody else: devices that are missing would make its plugin wait, and
    /// abort.
    fn members(&self, groups: &[Vec<i32>]) -> Result<(ReplicaGroups, Box<[i32]>)> {
        let (ids, elsewhere) = match (&self.devices, self.target()) {
            (Some(devices), _) => (devices.ids.clone(), false),
            (None, Target::Client(client)) => match client.devices().get(self.at) {
                Some(own) => with_others(client, own.id(), groups),
                None => (Vec::new(), false),
            },
            // The others of its group are not there either.
            (None, Target::Absent(_)) => (groups.concat(), false),
        };
        let place = |id: &i32| {
            let place = ids.iter().position(|own| own == id).map(|at| at as i64);
            place.ok_or_else(|| Error::runtime(format!("device {id} takes no part in tpu:{}", self.device)))
        };
        let group = |group: &Vec<i32>| group.iter().map(place).collect::<Result<Vec<i64>>>();
        let groups = groups.iter().map(group).collect::<Result<Vec<_>>>()?;
        let members = ReplicaGroups::new(groups).map_err(|e| Error::runtime(e.to_string()))?;
        match ids.len() - members.replicas() {
            0 => Ok((members, if elsewhere { ids.into() } else { Box::default() })),
            n => Err(Error::runtime(format!(
                "{n} of {} devices are in no group: all have to take part",
                ids.len()
            ))),
        }
    }
}

/// The device of a stream and those of its groups that are of other processes; whether there are such. Another device of
/// this process would have to be launched from here too: that is a mesh.
fn with_others(client: &Client, own: i32, groups: &[Vec<i32>]) -> (Vec<i32>, bool) {
    let is_here = |id: &i32| client.devices().iter().any(|device| device.id() == *id);
    let mut ids = groups.concat();
    ids.retain(|id| *id == own || client.device_ids().contains(id) && !is_here(id));
    if !ids.contains(&own) {
        ids.push(own); // which is then in no group
    }
    let elsewhere = ids.len() > 1;
    (ids, elsewhere)
}

/// A collective that is about to be launched.
pub(crate) struct Exchanged {
    pub(crate) exchange: Arc<Exchange>,
    /// The members of each group, by the ids of their devices.
    pub(crate) groups: Box<[Vec<i32>]>,
    /// What it takes.
    pub(crate) value: Held,
    /// The type of what it gives, of all devices.
    pub(crate) result: TensorType,
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
