//! Tensors as PyTorch hands them over.

use crate::error::{Error, Refusal};
use crate::picked;
use crate::value::Slot;
use crate::view::View;
use oxitorch_hlo::{DType, Dims, TensorType};

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// In a storage of ours.
    Device(&'a Slot),
    /// In host memory: all bytes from the first to the last element of the view.
    Host(&'a [u8]),
    /// On a device that is not ours.
    Foreign,
    /// Nowhere: an undefined tensor, or `None` in a list.
    Undefined,
}

/// A borrowed tensor argument.
#[derive(Clone, Debug)]
pub struct TensorRef<'a> {
    /// Where its elements are.
    pub place: Place<'a>,
    /// `None` for a dtype that has no StableHLO counterpart.
    pub dtype: Option<DType>,
    /// Sizes.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Storage offset in elements.
    pub offset: i64,
    /// Whether the strides are row-major.
    pub contiguous: bool,
    /// Whether it is a Python number that PyTorch wrapped.
    pub wrapped: bool,
    /// Index of its device.
    pub device: i32,
    /// Whether its elements are the conjugates of the stored ones.
    pub conj: bool,
    /// Whether its elements are the stored ones negated.
    pub neg: bool,
}

impl<'a> TensorRef<'a> {
    /// Whether it is there at all.
    pub fn is_defined(&self) -> bool {
        !matches!(self.place, Place::Undefined)
    }

    /// Whether it shows a storage from its beginning, in its order and as it is.
    pub(crate) fn is_whole(&self) -> bool {
        self.contiguous && self.offset == 0 && !self.conj && !self.neg
    }

    /// The dtype, or the request to run the op elsewhere.
    pub fn dtype(&self) -> Result<DType, Refusal> {
        self.dtype.ok_or_else(|| Refusal::Fallback("a dtype without StableHLO counterpart".to_owned()))
    }

    /// Its type.
    pub fn ty(&self) -> Result<TensorType, Refusal> {
        Ok(TensorType::new(self.dtype()?, self.sizes))
    }

    /// The storage of a tensor on our device.
    pub fn device(&self) -> Result<&'a Slot, Refusal> {
        match self.place {
            Place::Device(slot) => Ok(slot),
            Place::Host(_) => Err(Error::runtime(
                "expected all tensors to be on the same device, the tpu device, but found one on cpu",
            )
            .into()),
            _ => Err(Error::runtime("expected a tensor on the tpu device").into()),
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.sizes.iter().product()
    }

    /// The view of its storage that it is.
    pub fn view(&self) -> Result<View, Refusal> {
        self.check_bounds(self.device()?)?;
        Ok(View {
            dtype: self.dtype()?,
            sizes: Dims::from_slice(self.sizes),
            strides: Dims::from_slice(self.strides),
            offset: self.offset,
            conj: self.conj,
            neg: self.neg,
        })
    }

    /// A storage may have been shrunk below what the tensor shows.
    fn check_bounds(&self, slot: &Slot) -> Result<(), Refusal> {
        let item = self.dtype()?.size_bytes() as i64;
        let span: i64 = self.sizes.iter().zip(self.strides).map(|(n, s)| (n - 1) * s).sum();
        if self.sizes.contains(&0) || (self.offset + span + 1) * item <= slot.nbytes as i64 {
            return Ok(());
        }
        let message = format!(
            "setStorage: sizes {:?}, strides {:?}, storage offset {}, and itemsize {item} requiring a storage size of {} \
             are out of bounds for storage of size {}",
            self.sizes,
            self.strides,
            self.offset,
            (self.offset + span + 1) * item,
            slot.nbytes
        );
        Err(Error::runtime(message).into())
    }

    /// The row-major bytes of a host tensor.
    pub fn host_bytes(&self) -> Option<Vec<u8>> {
        let (Place::Host(bytes), Some(dtype)) = (self.place, self.dtype) else { return None };
        let item = dtype.size_bytes();
        let numel: usize = self.sizes.iter().map(|&n| n as usize).product();
        let mut out = vec![0; numel * item];
        picked::copy(bytes, item, self.sizes, self.strides, 0, &mut out);
        Some(out)
    }
}

impl std::fmt::Display for TensorRef<'_> {
    /// As messages name it: `float32[2, 3]`, with the device if it is not ours.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.is_defined() {
            return f.write_str("None");
        }
        match self.dtype {
            Some(dtype) => f.write_str(dtype.torch_name())?,
            None => f.write_str("?")?,
        }
        write!(f, "{:?}", self.sizes)?;
        match self.place {
            Place::Host(_) if !self.wrapped => f.write_str(" on cpu"),
            Place::Foreign => f.write_str(" on another device"),
            _ => Ok(()),
        }
    }
}
