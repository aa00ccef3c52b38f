//! The data of a request on a connection: in the buffer of a read, or wherever a write's bytes are. Nothing is copied for the connection.

use std::rc::Rc;

use weir_block::{Buffer, Region};
use weir_nbd::client::Body;

/// The bytes of a write, which stay as they are until it is answered.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// From this byte of a buffer on.
    Buffer(Rc<Buffer>, usize),
    /// Pieces of the write log (offset in the region, length).
    Gather(Rc<Region>, Rc<Vec<(usize, usize)>>),
    /// As many zeroes as needed, from a region of nothing else.
    Zeroes(Rc<Region>),
}

/// The data of one command.
#[derive(Debug, Default)]
pub(super) enum Data {
    #[default]
    None,
    /// A read's buffer, and the first byte of it that this command fills.
    Into(Buffer, usize),
    /// A write's bytes, without the first so many, which an earlier command has written.
    From(Source, usize),
}

impl Body for Data {
    fn pieces<'a>(&'a self, length: usize, each: &mut dyn FnMut(&'a [u8])) {
        let Data::From(source, done) = self else { return };
        match source {
            Source::Buffer(buffer, start) => each(&buffer.bytes()[start + done..start + done + length]),
            Source::Gather(region, pieces) => {
                let (mut skip, mut left) = (*done, length);
                for &(at, piece) in pieces.iter() {
                    let from = skip.min(piece);
                    let bytes = (piece - from).min(left);
                    if bytes > 0 {
                        each(region.bytes(at + from, bytes));
                    }
                    (skip, left) = (skip - from, left - bytes);
                }
            }
            Source::Zeroes(region) => {
                for at in (0..length).step_by(region.len()) {
                    each(region.bytes(0, region.len().min(length - at)));
                }
            }
        }
    }

    fn target(&mut self) -> &mut [u8] {
        match self {
            Data::Into(buffer, from) => &mut buffer.bytes_mut()[*from..],
            Data::None | Data::From(..) => &mut [],
        }
    }

    fn make_room(&mut self, length: usize) {
        // Whoever starts a command has seen to it.
        debug_assert!(match self {
            Data::Into(buffer, from) => buffer.len() >= *from + length,
            Data::From(..) | Data::None => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_block::BufferPool;

    fn sent(data: &Data, length: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        data.pieces(length, &mut |piece| bytes.extend_from_slice(piece));
        bytes
    }

    #[test]
    fn a_part_of_a_write_is_sent_from_where_it_is() {
        let region = Rc::new(Region::new(4096).unwrap());
        region.copy_in(100, b"abcd");
        region.copy_in(300, b"efgh");
        let gathered = Source::Gather(Rc::clone(&region), Rc::new(vec![(100, 4), (300, 4)]));
        assert_eq!(sent(&Data::From(gathered.clone(), 0), 8), b"abcdefgh");
        assert_eq!(sent(&Data::From(gathered.clone(), 3), 4), b"defg");
        assert_eq!(sent(&Data::From(gathered, 5), 3), b"fgh");
        let pool = BufferPool::new(1 << 20);
        let mut buffer = pool.take(8).unwrap();
        buffer.bytes_mut().copy_from_slice(b"ijklmnop");
        assert_eq!(sent(&Data::From(Source::Buffer(Rc::new(buffer), 2), 1), 3), b"lmn");
        let zeroes = Rc::new(Region::new(1).unwrap());
        let length = zeroes.len() + 512;
        assert_eq!(sent(&Data::From(Source::Zeroes(zeroes), 0), length), vec![0; length]);
    }
}
