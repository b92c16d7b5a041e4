//! The buffers of a value: one, or one on each device of a mesh. Programs take and give values of either form.

use crate::bulk;
use crate::spread::{How, Sharded, Spread};
use crate::strided::row_major;
use oxitorch_hlo::{DType, TensorType};
use oxitorch_pjrt as pjrt;
use smallvec::SmallVec;
use std::sync::Arc;

/// The buffers of a value.
#[derive(Clone, Debug)]
pub(crate) enum Buffers {
    /// On one device.
    One(Arc<pjrt::Buffer>),
    /// On the devices of a mesh.
    Many(Arc<Parts>),
}

/// A buffer on each device of a mesh.
#[derive(Debug)]
pub(crate) struct Parts {
    /// How the value is cut.
    sharding: Sharded,
    /// In the order in which the mesh counts devices.
    buffers: Box<[pjrt::Buffer]>,
}

impl Buffers {
    pub(crate) fn one(buffer: pjrt::Buffer) -> Buffers {
        Buffers::One(Arc::new(buffer))
    }

    fn many(sharding: Sharded, buffers: Box<[pjrt::Buffer]>) -> Buffers {
        Buffers::Many(Arc::new(Parts { sharding, buffers }))
    }

    /// One on each device.
    pub(crate) fn each(&self) -> &[pjrt::Buffer] {
        match self {
            Buffers::One(buffer) => std::slice::from_ref(buffer),
            Buffers::Many(parts) => &parts.buffers,
        }
    }

    /// How the value is cut.
    pub(crate) fn sharding(&self) -> &Sharded {
        match self {
            Buffers::One(_) => &None,
            Buffers::Many(parts) => &parts.sharding,
        }
    }

    /// A buffer that has all of the value, if there is one.
    pub(crate) fn whole(&self) -> Option<&pjrt::Buffer> {
        self.each().first().filter(|_| self.sharding().is_none())
    }

    /// Whether a plugin has taken its memory.
    pub(crate) fn is_deleted(&self) -> bool {
        self.each().iter().any(|b| b.is_deleted().unwrap_or(true))
    }

    /// Bytes of the value on each device.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.each().first().map_or(0, |b| b.size_bytes() as u64)
    }

    /// What it takes there with padding, if the plugin says it.
    pub(crate) fn padded_bytes(&self) -> Option<u64> {
        let bytes = |b: &pjrt::Buffer| b.on_device_bytes().ok().map(|n| n as u64);
        self.each().iter().filter_map(bytes).max()
    }

    /// Waits until the value is computed.
    pub(crate) fn wait(&self) -> pjrt::Result<()> {
        self.each().iter().try_for_each(pjrt::Buffer::wait)
    }

    /// Waits for the value, which has this type, and copies all of it to the host, row-major.
    pub(crate) fn to_host(&self, ty: &TensorType, out: &mut [u8]) -> pjrt::Result<()> {
        let Some(sharding) = self.sharding() else {
            return self.each().first().map_or(Ok(()), |b| b.to_host(out));
        };
        let mut part = Vec::new();
        for (device, buffer) in self.each().iter().enumerate() {
            part.resize(buffer.size_bytes(), 0);
            buffer.to_host(&mut part)?;
            let start = sharding.start(device, buffer.dims());
            runs(ty, buffer.dims(), &start, |whole, local, len| {
                out[whole..][..len].copy_from_slice(&part[local..][..len]);
            });
        }
        Ok(())
    }
}

/// Copies row-major bytes to a device of a client.
pub(crate) fn upload(
    client: &Arc<pjrt::Client>,
    device: usize,
    ty: &TensorType,
    bytes: &[u8],
) -> pjrt::Result<pjrt::Buffer> {
    let (dtype, device) = (element(ty.dtype), &client.devices()[device]);
    // The plugin copies with one thread.
    if bytes.len() >= bulk::LEAST
        && let Some(buffer) = client.buffer_filled(dtype, &ty.shape, device, |to| bulk::copy(bytes, to))?
    {
        return Ok(buffer);
    }
    client.buffer_from_host(bytes, dtype, &ty.shape, device)
}

/// Copies to each device what it has of a value; `local` is the type of that.
pub(crate) fn upload_sharded(
    client: &Arc<pjrt::Client>,
    devices: &[usize],
    ty: &TensorType,
    (sharding, local): (Sharded, &TensorType),
    bytes: &[u8],
) -> pjrt::Result<Buffers> {
    let mut part = vec![0; if sharding.is_some() { local.bytes().max(0) as usize } else { 0 }];
    let buffer = |(place, &device): (usize, &usize)| {
        let Some(sharding) = &sharding else { return upload(client, device, ty, bytes) };
        let start = sharding.start(place, &local.shape);
        runs(ty, &local.shape, &start, |whole, local, len| {
            part[local..][..len].copy_from_slice(&bytes[whole..][..len]);
        });
        upload(client, device, local, &part)
    };
    let buffers = devices.iter().enumerate().map(buffer).collect::<pjrt::Result<_>>()?;
    Ok(Buffers::many(sharding, buffers))
}

/// The runs of bytes that a part of a value has in one piece there and in the whole: where they are in both, and how long.
fn runs(whole: &TensorType, local: &[i64], start: &[i64], mut run: impl FnMut(usize, usize, usize)) {
    let item = whole.dtype.size_bytes();
    // From the last dimension that is cut on, elements are in one piece.
    let inner = (0..local.len()).rfind(|&d| local[d] != whole.shape[d]).unwrap_or(0);
    let (outer, piece) = local.split_at(inner);
    let len = piece.iter().product::<i64>() as usize * item;
    let strides = row_major(&whole.shape);
    let first: i64 = start.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
    for n in 0..outer.iter().product::<i64>() {
        let (mut rest, mut at) = (n, first);
        for (size, stride) in outer.iter().zip(&strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        if len > 0 {
            run(at as usize * item, n as usize * len, len);
        }
    }
}

/// When the devices of a launch have run it.
pub(crate) struct Done(SmallVec<[pjrt::Event; 1]>);

impl Done {
    /// Whether some device still runs it. What cannot be asked about is over.
    pub(crate) fn is_running(&self) -> bool {
        self.0.iter().any(|event| event.is_ready().is_ok_and(|ready| !ready))
    }

    /// Waits for all; an error is what went wrong on one.
    pub(crate) fn wait(&self) -> pjrt::Result<()> {
        let mut outcomes = self.0.iter().map(pjrt::Event::wait);
        let first = outcomes.find(Result::is_err).unwrap_or(Ok(()));
        outcomes.for_each(drop); // the others run still
        first
    }

    /// Calls this when a device has run it, with what went wrong there.
    pub(crate) fn then(&self, then: impl FnOnce(pjrt::Result<()>) + Clone + Send + 'static) {
        for event in &self.0 {
            let _ = event.on_ready(then.clone()); // a plugin that calls nobody back drops it
        }
    }

    /// Drops this when all have run it.
    pub(crate) fn then_drop(&self, last: impl Send + Sync + 'static) {
        // A plugin that calls nobody back drops its callback.
        if let [event] = &self.0[..] {
            let _ = event.on_ready(move |_| drop(last));
            return;
        }
        let last = Arc::new(last);
        for event in &self.0 {
            let last = last.clone();
            let _ = event.on_ready(move |_| drop(last));
        }
    }
}

/// What a launch gave.
pub(crate) type Launched = (SmallVec<[Buffers; 2]>, Option<Done>);

/// Launches a program, on `device` if it is not spread; with the event of its end if that is asked for. `kept`: arguments
/// that are not given away.
pub(crate) fn execute(
    executable: &pjrt::Executable,
    spread: Option<&Spread>,
    device: usize,
    args: &[Buffers],
    kept: &[i64],
    ask: bool,
) -> pjrt::Result<Launched> {
    if let Some(spread) = spread.filter(|s| s.how != How::Processes) {
        return execute_on_all(executable, spread, args, kept);
    }
    let args: SmallVec<[&pjrt::Buffer; 8]> = args.iter().flat_map(Buffers::each).collect();
    let device = executable.client().devices().get(device);
    let how = pjrt::ExecuteArgs { non_donatable: kept, device };
    let (results, done) = if ask {
        let (results, done) = executable.execute_with_event(&args, &how)?;
        (results, Some(Done(SmallVec::from_buf([done]))))
    } else {
        (executable.execute(&args, &how)?, None)
    };
    Ok((results.into_iter().map(Buffers::one).collect(), done))
}

fn execute_on_all(
    executable: &pjrt::Executable,
    spread: &Spread,
    args: &[Buffers],
    kept: &[i64],
) -> pjrt::Result<Launched> {
    // The plugin has its own order of devices.
    let places: SmallVec<[usize; 8]> =
        executable.devices().filter_map(|d| spread.devices.place(d.index())).collect();
    let on = |&place: &usize| args.iter().filter_map(|a| a.each().get(place)).collect::<Vec<_>>();
    let lists: Vec<Vec<&pjrt::Buffer>> = places.iter().map(on).collect();
    let lists: SmallVec<[&[&pjrt::Buffer]; 8]> = lists.iter().map(Vec::as_slice).collect();
    let (results, done) = executable.execute_sharded_with_events(&lists, kept)?;
    let mut placed: Vec<_> = places.into_iter().zip(results.into_iter().map(Vec::into_iter)).collect();
    placed.sort_unstable_by_key(|(place, _)| *place);
    let mut next = |i: usize| {
        let sharding = spread.outputs.get(i).cloned().flatten(); // what comes behind them is checks: numbers
        Buffers::many(sharding, placed.iter_mut().filter_map(|(_, results)| results.next()).collect())
    };
    let results = (0..executable.outputs().len()).map(&mut next).collect();
    Ok((results, Some(Done(done.into()))))
}

/// The plugin's name for an element type.
pub(crate) fn element(dtype: DType) -> pjrt::ElementType {
    use pjrt::ElementType as E;
    match dtype {
        DType::Pred => E::Pred,
        DType::S8 => E::S8,
        DType::S16 => E::S16,
        DType::S32 => E::S32,
        DType::S64 => E::S64,
        DType::U8 => E::U8,
        DType::U16 => E::U16,
        DType::U32 => E::U32,
        DType::U64 => E::U64,
        DType::F8E4M3FN => E::F8E4M3FN,
        DType::F8E5M2 => E::F8E5M2,
        DType::F16 => E::F16,
        DType::BF16 => E::Bf16,
        DType::F32 => E::F32,
        DType::F64 => E::F64,
        DType::C64 => E::C64,
        DType::C128 => E::C128,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oxitorch_hlo::{Mesh, Sharding};

    #[test]
    fn parts_make_up_the_whole() {
        let mesh = Arc::new(Mesh::new(&[("x", 2), ("y", 3)]).unwrap());
        let whole = TensorType::new(DType::S16, vec![4, 6, 3]);
        let bytes: Vec<u8> = (0..whole.bytes() as u8).collect();
        let ways: [&[&[&str]]; 5] =
            [&[], &[&["x"]], &[&[], &["y"]], &[&["x"], &[], &["y"]], &[&[], &["y", "x"]]];
        for dims in ways {
            let sharding = Sharding::new(&mesh, dims).unwrap();
            let local = sharding.local(&whole).unwrap();
            let mut seen = vec![0; bytes.len()];
            for device in 0..mesh.devices() {
                let start = sharding.start(device, &local.shape);
                let mut part = vec![0; local.bytes() as usize];
                runs(&whole, &local.shape, &start, |w, l, len| {
                    part[l..][..len].copy_from_slice(&bytes[w..][..len]);
                    seen[w..][..len].iter_mut().for_each(|n| *n += 1);
                });
                let first: i64 = start.iter().zip(row_major(&whole.shape)).map(|(at, s)| at * s).sum();
                assert_eq!(part[0], bytes[2 * first as usize], "{sharding}, device {device}");
            }
            let copies = mesh.devices() / sharding.parts();
            assert!(seen.iter().all(|n| *n == copies), "{sharding}");
        }
    }

    #[test]
    fn numbers_and_nothing_are_one_run_and_none() {
        let count = |shape: &[i64]| {
            let mut found = Vec::new();
            let ty = TensorType::new(DType::F32, shape);
            runs(&ty, shape, &vec![0; shape.len()], |w, l, len| found.push((w, l, len)));
            found
        };
        assert_eq!(count(&[]), [(0, 0, 4)]);
        assert_eq!(count(&[2, 3]), [(0, 0, 24)]);
        assert_eq!(count(&[0, 3]), []);
    }
}
