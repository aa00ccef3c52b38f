//! Frames on the registry's socket: a length (32 bits, little-endian), then that many bytes of JSON.

use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// Longest frame, in bytes. The largest transaction fits even if JSON escapes each of its bytes.
pub const MAX_FRAME: usize = 16 << 20;
/// Size of one batched write to the socket, in bytes.
const BATCH: usize = 256 << 10;

/// The reason why no frame came.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    /// The peer closed between two frames.
    #[error("the other side closed the connection")]
    Closed,
    /// The peer closed within a frame, or the socket failed.
    #[error("the connection broke: {0}")]
    Broken(std::io::Error),
    /// Not this protocol, or an attempt to exhaust memory.
    #[error("a frame of {0} bytes is over the limit of {MAX_FRAME}")]
    TooLong(usize),
}

/// Reads frames from a stream. Memory grows with the bytes that arrive, not with an announced length.
pub(super) struct FrameReader<R> {
    stream: R,
    bytes: Vec<u8>,
    /// Bytes at the front of frames already returned.
    taken: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub fn new(stream: R) -> FrameReader<R> {
        FrameReader { stream, bytes: Vec::new(), taken: 0 }
    }

    /// The next frame's JSON. Cancel safe.
    pub async fn next(&mut self) -> Result<&[u8], FrameError> {
        loop {
            if let Some(length) = self.complete()? {
                let start = self.taken + 4;
                self.taken = start + length;
                return Ok(&self.bytes[start..self.taken]);
            }
            self.bytes.drain(..self.taken);
            self.taken = 0;
            match self.stream.read_buf(&mut self.bytes).await {
                Ok(0) if self.bytes.is_empty() => return Err(FrameError::Closed),
                Ok(0) => return Err(FrameError::Broken(std::io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) => return Err(FrameError::Broken(error)),
            }
        }
    }

    /// The length of the next frame, if complete.
    fn complete(&self) -> Result<Option<usize>, FrameError> {
        let rest = &self.bytes[self.taken..];
        let Some((length, body)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(FrameError::TooLong(length));
        }
        Ok((body.len() >= length).then_some(length))
    }
}

/// Length and JSON of `message`; `None` when it is over [`MAX_FRAME`].
pub(super) fn encode(message: &impl Serialize) -> Option<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)
        .expect("strings and numbers always serialise, and a Vec takes all");
    let length = u32::try_from(frame.len() - 4).ok().filter(|length| *length as usize <= MAX_FRAME)?;
    frame[..4].copy_from_slice(&length.to_le_bytes());
    Some(frame)
}

/// Takes frames from a queue and writes all waiting ones in one batch.
pub(super) async fn write_frames<W: AsyncWrite + Unpin>(
    mut stream: W,
    mut frames: impl FrameQueue,
) -> std::io::Result<()> {
    while let Some(mut bytes) = frames.next().await {
        while bytes.len() < BATCH
            && let Some(more) = frames.ready()
        {
            bytes.extend_from_slice(&more);
        }
        stream.write_all(&bytes).await?;
    }
    stream.shutdown().await
}

/// A queue of encoded frames.
pub(super) trait FrameQueue {
    async fn next(&mut self) -> Option<Vec<u8>>;
    fn ready(&mut self) -> Option<Vec<u8>>;
}

impl FrameQueue for mpsc::Receiver<Vec<u8>> {
    async fn next(&mut self) -> Option<Vec<u8>> {
        self.recv().await
    }
    fn ready(&mut self) -> Option<Vec<u8>> {
        self.try_recv().ok()
    }
}

impl FrameQueue for mpsc::UnboundedReceiver<Vec<u8>> {
    async fn next(&mut self) -> Option<Vec<u8>> {
        self.recv().await
    }
    fn ready(&mut self) -> Option<Vec<u8>> {
        self.try_recv().ok()
    }
}
