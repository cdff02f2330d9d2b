//! Hands a session over to kernel TLS.

use std::io;

use adit_relay::{KernelTls, KernelTlsError, TrafficKeys};
use tokio::net::TcpStream;

use super::RecordStream;
use super::keys::{CHACHA, Half, broken, expand_label};

impl Half {
    /// The keys as kernel TLS takes them; `None` for a cipher that is not handed over.
    fn keys(&self) -> io::Result<Option<TrafficKeys>> {
        if std::ptr::eq(self.suite, &CHACHA) {
            return Ok(None);
        }
        let mut keys = TrafficKeys {
            key: vec![0; self.suite.aead.key_len()],
            iv: *self.iv,
            sequence: self.sequence,
            records: self.records,
        };
        expand_label(self.suite, &self.secret, b"key", &mut keys.key)?;
        Ok(Some(keys))
    }
}

impl RecordStream {
    /// Makes the socket ready for [`Self::start_kernel_tls`], while the connection is open both ways: later the kernel
    /// refuses. Changes nothing else.
    ///
    /// # Errors
    /// The kernel's error, or this is no TCP connection.
    pub fn attach_kernel_tls(&mut self) -> io::Result<()> {
        let tcp = self.tcp().ok_or(io::ErrorKind::InvalidInput)?;
        if !self.attached {
            adit_relay::attach_kernel_tls(tcp)?;
            self.attached = true;
        }
        Ok(())
    }

    /// Gives the keys to the kernel, which seals and opens all later records. The peer's next byte must be the first one of
    /// a record that this end has not read, and all sealed records must have been written.
    ///
    /// # Errors
    /// See [`KernelTlsError`]; after [`KernelTlsError::Untouched`] this session goes on.
    pub fn start_kernel_tls(&mut self) -> Result<KernelTls, KernelTlsError> {
        let untouched = |why: &'static str| KernelTlsError::Untouched(broken(why));
        if self.ended || !self.read.bytes().is_empty() || !self.contents.is_at_boundary() {
            return Err(untouched("the peer has said more than it should have"));
        }
        if self.sealed.is_some() || self.update_due {
            return Err(untouched("records of this end wait to be sent"));
        }
        let keys = |half: &Half| {
            let keys = half.keys().map_err(KernelTlsError::Untouched)?;
            keys.ok_or_else(|| untouched("not a cipher for kernel TLS"))
        };
        let (sending, receiving) = (keys(&self.tx)?, keys(&self.rx)?);
        self.attach_kernel_tls()
            .map_err(KernelTlsError::Untouched)?;
        let tcp = self.tcp().ok_or_else(|| untouched("no TCP connection"))?;
        KernelTls::start(tcp, &sending, &receiving)
    }

    /// The TCP socket alone, once [`Self::start_kernel_tls`] has succeeded.
    #[must_use]
    pub fn into_tcp(self) -> Option<TcpStream> {
        self.socket.into_tcp()
    }
}
