//! Ops of several devices.

use super::*;

pub(super) fn collective(s: &Sig<'_>, what: Collective, groups: &ReplicaGroups) -> Result {
    let (x, members) = (s.operands[0], groups.size() as i64);
    match what {
        Collective::AllReduce | Collective::ReduceScatter(_) => reducer(s, &[x.dtype])?,
        Collective::AllGather(_) | Collective::AllToAll { .. } => same_len(s.regions.len(), 0, "regions")?,
    }
    let mut ty = x.clone();
    if let Collective::ReduceScatter(dim) | Collective::AllToAll { split: dim, .. } = what {
        let dim = dim_in_range(dim, x.rank(), "dimension")?;
        let size = ty.shape[dim];
        ensure!(size % members == 0, "dimension {dim} of size {size} has no {members} equal parts");
        ty.shape[dim] = size / members;
    }
    if let Collective::AllGather(dim) | Collective::AllToAll { concat: dim, .. } = what {
        let dim = dim_in_range(dim, x.rank(), "dimension")?;
        ty.shape[dim] = checked(ty.shape[dim].checked_mul(members))?;
    }
    one(ty)
}

pub(super) fn collective_permute(x: &TensorType, pairs: &[(i64, i64)]) -> Result {
    for (i, (from, to)) in pairs.iter().enumerate() {
        ensure!(*from >= 0 && *to >= 0, "replicas {from} and {to}: they are counted from 0");
        let is_new = !pairs[..i].iter().any(|(f, t)| f == from || t == to);
        ensure!(is_new, "a replica sends and is sent to once, and {from} to {to} is not the first");
    }
    one(x.clone())
}
