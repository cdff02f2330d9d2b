//! System calls of kTLS: attaching a socket, setting keys, and records with their type in a control message.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _};

use zeroize::Zeroizing;

use super::tcp::set_option;

/// Space for one control message with one byte and padding: the kernel's header and eight bytes.
const CONTROL_BYTES: libc::c_uint = 64;

/// Memory for a control message, aligned for its header.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES as usize]);

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyDirection {
    /// Sending.
    Out,
    /// Receiving.
    In,
}

/// A part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes read.
    pub(crate) count: usize,
    /// The record's type; `None` at EOF.
    pub(crate) kind: Option<u8>,
}

/// Attaches kTLS to a connected socket, which encrypts nothing until it has keys.
pub(crate) fn attach(socket: impl AsFd) -> io::Result<()> {
    set_option(&socket, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls")
}

/// Sets the keys of one direction, in the layout of the kernel's `tls12_crypto_info_*`.
pub(crate) fn set_keys(socket: impl AsFd, way: KeyDirection, info: &[u8]) -> io::Result<()> {
    let option = match way {
        KeyDirection::Out => libc::TLS_TX,
        KeyDirection::In => libc::TLS_RX,
    };
    set_option(&socket, libc::SOL_TLS, option, info)
}

/// Keys of AES-GCM and TLS 1.3 in the layout of `tls12_crypto_info_aes_gcm_*`: version, cipher, IV, key, salt, number
/// of the next record.
///
/// # Errors
/// The key is not 16 or 32 bytes long.
pub(crate) fn aes_gcm_info(
    key: &[u8],
    iv: [u8; 12],
    sequence: u64,
) -> io::Result<Zeroizing<Vec<u8>>> {
    let cipher = match key.len() {
        16 => libc::TLS_CIPHER_AES_GCM_128,
        32 => libc::TLS_CIPHER_AES_GCM_256,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let (salt, iv) = iv.split_at(4);
    // Large enough never to reallocate, which would leave a copy of the key in memory.
    let mut info = Zeroizing::new(Vec::with_capacity(64));
    info.extend_from_slice(&libc::TLS_1_3_VERSION.to_ne_bytes());
    info.extend_from_slice(&cipher.to_ne_bytes());
    info.extend_from_slice(iv);
    info.extend_from_slice(key);
    info.extend_from_slice(salt);
    info.extend_from_slice(&sequence.to_be_bytes());
    Ok(info)
}

/// Reads bytes of records of one type, and their type.
pub(crate) fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<Received> {
    let fd = socket.as_fd().as_raw_fd();
    let mut control = Control([0; CONTROL_BYTES as usize]);
    let mut slice = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    loop {
        let mut message = message(&mut slice, &mut control, CONTROL_BYTES);
        // SAFETY: the descriptor is open for the call. `message` points to one slice of exactly the memory of `into` and
        // to `CONTROL_BYTES` of `control`, all of which outlive the call and have no other borrows.
        let count = unsafe { libc::recvmsg(fd, &raw mut message, 0) };
        if let Ok(count) = usize::try_from(count) {
            let kind = record_type(&message);
            return Ok(Received { count, kind });
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Sends a record of a type other than data, whole or not at all.
pub(crate) fn send(socket: impl AsFd, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let fd = socket.as_fd().as_raw_fd();
    let mut control = Control([0; CONTROL_BYTES as usize]);
    let mut slice = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: a function of one number, without any precondition.
    let space = unsafe { libc::CMSG_SPACE(1) };
    let message = message(&mut slice, &mut control, space);
    // SAFETY: `message` points to `control`, which has room for a header and `space` bytes, so the first header is in it.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: a function of one number, without any precondition.
    let length = unsafe { libc::CMSG_LEN(1) };
    // SAFETY: numbers alone, some of them padding on some systems.
    let mut head = unsafe { MaybeUninit::<libc::cmsghdr>::zeroed().assume_init() };
    head.cmsg_len = length as _;
    head.cmsg_level = libc::SOL_TLS;
    head.cmsg_type = libc::TLS_SET_RECORD_TYPE;
    // SAFETY: `header` is the start of `control`, which is aligned for it, large enough and initialised.
    unsafe { header.write(head) };
    // SAFETY: `header` was just written, and one byte lies behind it within `control`.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: as above: that byte is in `control`.
    unsafe { data.write(kind) };
    loop {
        // SAFETY: the descriptor is open for the call. The slice is exactly the memory of `bytes`, which the kernel only
        // reads; `control` holds one whole message. Both outlive the call.
        let count = unsafe { libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL) };
        match usize::try_from(count) {
            Ok(count) if count == bytes.len() => return Ok(()),
            Ok(_part) => return Err(io::ErrorKind::WriteZero.into()),
            Err(_negative) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// A message with one slice and `length` bytes of control memory.
fn message(slice: &mut libc::iovec, control: &mut Control, length: libc::c_uint) -> libc::msghdr {
    // SAFETY: pointers and numbers, for all of which zero is a value.
    let mut message = unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() };
    message.msg_iov = slice;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = length as _;
    message
}

/// The record type in the kernel's control message, if there is one.
fn record_type(message: &libc::msghdr) -> Option<u8> {
    // SAFETY: the kernel has filled in the message, and its control memory still lives.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null, or the start of control memory that is aligned, initialised and holds a whole header.
    let head = unsafe { header.as_ref() }?;
    // SAFETY: a function of one number, without any precondition.
    let needed = unsafe { libc::CMSG_LEN(1) };
    if (head.cmsg_level, head.cmsg_type) != (libc::SOL_TLS, libc::TLS_GET_RECORD_TYPE)
        || head.cmsg_len < needed as _
    {
        return None;
    }
    // SAFETY: the header's length includes one byte of data, which lies within the control memory.
    let data = unsafe { libc::CMSG_DATA(header) };
    // SAFETY: as above.
    Some(unsafe { data.read() })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_end_of_stream_is_no_record_and_a_record_of_another_type_needs_kernel_tls() {
        let (one, other) = UnixStream::pair().unwrap();
        let refused = send(&one, 21, &[1, 0]);
        // A Unix socket does not know this control message; if it sends the bytes, they have no record type.
        drop(one);
        let mut buffer = [0; 8];
        let got = receive(&other, &mut buffer).unwrap();
        assert_eq!(got.kind, None);
        assert_eq!(got.count, if refused.is_ok() { 2 } else { 0 });
        assert!(attach(&other).is_err() && set_keys(&other, KeyDirection::Out, &[0; 40]).is_err());
    }
}
