//! The bytes of requests, wherever their owner keeps them: a request is sent from there, and the answer to a read is received there.

/// The data of the request in one slot.
pub trait Body {
    /// Calls `each` with the first `length` bytes of a write's data, piece by piece and in order. They stay as they are until the
    /// request is answered.
    fn pieces<'a>(&'a self, length: usize, each: &mut dyn FnMut(&'a [u8]));

    /// The place for a read's data.
    fn target(&mut self) -> &mut [u8];

    /// Makes the place for `length` bytes, if it can grow.
    fn make_room(&mut self, length: usize);
}

impl Body for Vec<u8> {
    fn pieces<'a>(&'a self, length: usize, each: &mut dyn FnMut(&'a [u8])) {
        each(&self[..length]);
    }

    fn target(&mut self) -> &mut [u8] {
        self
    }

    fn make_room(&mut self, length: usize) {
        if self.len() < length {
            self.resize(length, 0);
        }
    }
}
