//! Memory for direct I/O.

/// Alignment of buffers for direct I/O, in bytes: the largest logical block of a device.
pub const PAGE: usize = 4096;

#[derive(Clone, Debug)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Whole pages of [`PAGE`] bytes, zeroed.
#[derive(Debug)]
pub struct Pages(Vec<Page>);

impl Pages {
    /// Memory of `bytes`, rounded up to whole pages.
    #[must_use]
    pub fn new(bytes: usize) -> Pages {
        Pages(vec![Page([0; PAGE]); bytes.div_ceil(PAGE)])
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `Page` is its bytes alone, aligned to as many, so the vector is one run of initialised bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<u8>(), self.0.len() * PAGE) }
    }

    /// All of it, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<u8>(), self.0.len() * PAGE) }
    }
}
