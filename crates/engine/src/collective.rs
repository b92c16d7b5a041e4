//! Collectives as instances: what each member of a group computes, of the tensors of all.

use oxitorch_aten as aten;
use oxitorch_capture::{Collective, Reduction};
use oxitorch_hlo::{Binary, Builder, ReplicaGroups, TensorType, Value};

/// A collective on tensors of one type. It depends on nothing else, so that all members make the same program of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Exchange {
    pub(crate) what: Collective,
    /// Of the tensor that each member has.
    pub(crate) ty: TensorType,
    /// The members, by their places among the devices of the program.
    pub(crate) groups: ReplicaGroups,
    /// The ids of those devices, if most are of other processes. Empty: the program is for those of its stream.
    pub(crate) devices: Box<[i32]>,
}

impl Exchange {
    /// What each member gets.
    pub(crate) fn emit(&self, b: &Builder, x: Value) -> Result<Value, aten::Error> {
        let groups = &self.groups;
        let value = match &self.what {
            Collective::AllReduce(r) if is_of_bits(*r) => {
                self.reduce_bits(b, b.all_gather(b.unsqueeze(x, 0), 0, groups), *r)
            }
            Collective::ReduceScatter(r) if is_of_bits(*r) => self.reduce_bits(b, self.sent(b, x)?, *r),
            Collective::AllReduce(r) => self.reduced(b, *r, b.all_reduce(x, groups, binary(*r)))?,
            Collective::ReduceScatter(r) => {
                self.reduced(b, *r, b.reduce_scatter(x, 0, groups, binary(*r)))?
            }
            Collective::AllGather => b.all_gather(x, 0, groups),
            Collective::AllToAll => b.all_to_all(x, 0, 0, groups),
            Collective::Permute(pairs) => b.collective_permute(x, &self.pairs(pairs)?),
            Collective::Broadcast(root) => self.broadcast(b, x, *root)?,
        };
        b.error().map_or(Ok(value), |e| Err(self.refused(&e.to_string())))
    }

    /// What the members sent, a row each, reduced to one.
    fn reduce_bits(&self, b: &Builder, rows: Value, reduction: Reduction) -> Value {
        let neutral = if reduction == Reduction::And { -1 } else { 0 };
        b.reduce_with(binary(reduction), rows, b.scalar_i64(self.ty.dtype, neutral), &[0])
    }

    /// The own part of each member's tensor, a row each.
    fn sent(&self, b: &Builder, x: Value) -> Result<Value, aten::Error> {
        let mut shape = self.ty.shape.clone();
        let members = self.groups.size() as i64;
        match shape.first_mut() {
            Some(size) if *size % members == 0 => *size /= members,
            _ => {
                return Err(self.refused(&format!("dimension 0 of {} has no {members} equal parts", self.ty)));
            }
        }
        shape.insert(0, members);
        Ok(b.reshape(b.all_to_all(x, 0, 0, &self.groups), &shape))
    }

    /// A sum, if an average is wanted by their number.
    fn reduced(&self, b: &Builder, reduction: Reduction, sum: Value) -> Result<Value, aten::Error> {
        if reduction != Reduction::Average {
            return Ok(sum);
        }
        if !self.ty.dtype.is_float() && !self.ty.dtype.is_complex() {
            let dtype = self.ty.dtype.torch_name();
            return Err(self.refused(&format!("an average is of floats or complex numbers, got {dtype}")));
        }
        Ok(b.divide(sum, b.full_like(sum, self.groups.size() as f64)))
    }

    /// Which replica sends to which, in each group.
    fn pairs(&self, pairs: &[(u32, u32)]) -> Result<Vec<(i64, i64)>, aten::Error> {
        let mut all = Vec::with_capacity(pairs.len() * self.groups.groups().len());
        for group in self.groups.groups() {
            for &(from, to) in pairs {
                all.push((self.member(group, from)?, self.member(group, to)?));
            }
        }
        Ok(all)
    }

    fn member(&self, group: &[i64], place: u32) -> Result<i64, aten::Error> {
        let found = group.get(place as usize).copied();
        found
            .ok_or_else(|| self.refused(&format!("there is no member {place} in a group of {}", group.len())))
    }

    /// By a gather, as compilers for hardware have no broadcast; and a sum with zeros would change bits.
    fn broadcast(&self, b: &Builder, x: Value, root: u32) -> Result<Value, aten::Error> {
        self.member(&self.groups.groups()[0], root)?;
        let shape = b.shape(x);
        let rows = if shape.is_empty() { b.reshape(x, &[1]) } else { x };
        let (count, root) = (b.dim(rows, 0), i64::from(root));
        let all = b.all_gather(rows, 0, &self.groups);
        Ok(b.reshape(b.slice_dim(all, 0, root * count, (root + 1) * count, 1), &shape))
    }

    fn refused(&self, why: &str) -> aten::Error {
        aten::Error::Runtime(format!("{}: {why}", self.what.name()))
    }
}

/// Compilers have no collectives that reduce bit by bit: elements are sent first.
fn is_of_bits(reduction: Reduction) -> bool {
    matches!(reduction, Reduction::And | Reduction::Or | Reduction::Xor)
}

/// The op by which two elements become one.
fn binary(reduction: Reduction) -> Binary {
    match reduction {
        Reduction::Sum | Reduction::Average => Binary::Add,
        Reduction::Product => Binary::Multiply,
        Reduction::Min => Binary::Minimum,
        Reduction::Max => Binary::Maximum,
        Reduction::And => Binary::And,
        Reduction::Or => Binary::Or,
        Reduction::Xor => Binary::Xor,
    }
}
