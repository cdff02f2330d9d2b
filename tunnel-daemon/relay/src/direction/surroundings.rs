//! The interface of a direction to its sockets, pools and counters.

use std::io;

/// Operations that a direction needs. No call blocks; each returns the bytes moved.
pub(crate) trait Io {
    type Pipe;
    /// Reads from the source. Zero is EOF.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Writes to the sink.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Moves bytes from the source into the pipe, as far as the pipe has room. Zero is EOF, or an urgent byte is next.
    fn fill(&mut self, pipe: &Self::Pipe) -> io::Result<usize>;
    /// Moves up to `held` bytes from the pipe to the sink.
    fn drain(&mut self, pipe: &Self::Pipe, held: usize) -> io::Result<usize>;
    /// Reads from the pipe into memory, if its bytes cannot be spliced into the sink.
    fn unload(&mut self, pipe: &Self::Pipe, into: &mut [u8]) -> io::Result<usize>;
    /// Sends FIN or close_notify to the sink. `WouldBlock` if the sink has no room.
    fn finish(&mut self) -> io::Result<()>;
    /// Publishes the total bytes that the sink has taken.
    fn progress(&mut self, delivered: u64);
    fn capacity(pipe: &Self::Pipe) -> usize;
    fn lend_pipe(&mut self) -> Option<Self::Pipe>;
    fn return_pipe(&mut self, pipe: Self::Pipe, is_empty: bool);
    fn lend_buffer(&mut self, size: usize) -> Vec<u8>;
    fn return_buffer(&mut self, buffer: Vec<u8>);
}
