//! What is around a direction: its two ends, the pools it borrows from, and who counts.

use std::io;

/// What a direction needs from its surroundings. No call blocks; each reports what it moved.
pub(crate) trait Io {
    type Pipe;
    /// Reads from the source. Zero is end of stream.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Writes to the sink.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Moves from the source into the pipe, as much as it has room for. Zero is end of stream, or an urgent byte before it.
    fn fill(&mut self, pipe: &Self::Pipe) -> io::Result<usize>;
    /// Moves up to `held` bytes from the pipe to the sink.
    fn drain(&mut self, pipe: &Self::Pipe, held: usize) -> io::Result<usize>;
    /// Reads from the pipe into memory, when its bytes cannot be spliced any further.
    fn unload(&mut self, pipe: &Self::Pipe, into: &mut [u8]) -> io::Result<usize>;
    /// Tells the sink that nothing follows. `WouldBlock` when it has no room for that.
    fn finish(&mut self) -> io::Result<()>;
    /// The sink has taken this many bytes, in all.
    fn progress(&mut self, delivered: u64);
    fn capacity(pipe: &Self::Pipe) -> usize;
    fn lend_pipe(&mut self) -> Option<Self::Pipe>;
    fn return_pipe(&mut self, pipe: Self::Pipe, is_empty: bool);
    fn lend_buffer(&mut self, size: usize) -> Vec<u8>;
    fn return_buffer(&mut self, buffer: Vec<u8>);
}
