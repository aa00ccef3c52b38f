//! Files whose content is kept by the simulation that uses the world: several of them may show one storage.

/// A file's content. It must not use the world. Offsets and lengths are whole pages of 4096 bytes.
pub trait Storage: Send {
    /// Reads, when the operation takes effect.
    ///
    /// # Errors
    /// The error number.
    fn read(&mut self, offset: u64, target: &mut [u8]) -> Result<(), i32>;

    /// Writes.
    ///
    /// # Errors
    /// The error number.
    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), i32>;

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The error number.
    fn sync(&mut self) -> Result<(), i32>;
}
