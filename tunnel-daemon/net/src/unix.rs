//! Unix listeners as upstream makes them: mode 0770, a stale socket file removed first if allowed, the file removed on
//! orderly close. Only that mode decides who may connect, so it is never wider, not for a moment.

use std::{
    fs, io,
    os::fd::AsRawFd as _,
    os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt as _, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::Mode;
use socket2::{Domain, SockAddr, Socket, Type};
use std::os::unix::net::UnixListener as StdListener;
use tokio::net::{UnixListener, UnixStream};

use crate::listen::{BACKLOG, ListenError};

/// Who may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketMode {
    /// The process's user and group: what umask 0007 leaves of 0777.
    Group,
    /// The process's user alone.
    Owner,
}

impl SocketMode {
    fn bits(self) -> u32 {
        match self {
            Self::Group => 0o770,
            Self::Owner => 0o600,
        }
    }
}

/// What to do with a file that already has the socket's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleFile {
    /// Remove it if it is a socket, used or not: upstream's default, needed after a crash.
    Remove,
    /// Remove it if it is a socket at which no process listens: listening takes no socket from a running process.
    RemoveDead,
    /// Leave it; listening then fails.
    Keep,
}

impl StaleFile {
    /// Whether an existing file is to be removed.
    #[must_use]
    pub fn of(delete_existing: bool) -> Self {
        if delete_existing {
            Self::Remove
        } else {
            Self::Keep
        }
    }
}

/// A unix socket and its file, which is removed when this is dropped.
#[derive(Debug)]
pub struct UnixSocket<L> {
    /// Before the listener, for the order of drops: while the socket is open its inode number cannot be taken by
    /// another file, so the guard can tell its own file.
    file: SocketFile,
    listener: L,
}

/// A unix socket that listens and is not served yet.
pub type UnixBound = UnixSocket<StdListener>;
/// A listening unix socket.
pub type UnixListening = UnixSocket<UnixListener>;

impl<L> UnixSocket<L> {
    /// The socket's file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl UnixBound {
    /// Binds and listens at `path`.
    ///
    /// The mode is put on the socket before it has a name: Linux applies it, less the umask, to the file that bind creates.
    /// Then the mode is put on the file, and only then does the socket listen: a stranger can never connect in between.
    /// Binding under another name and renaming is worse: rename replaces any file, and the longer name can exceed the 107
    /// bytes of a socket name.
    ///
    /// # Errors
    /// The name is in use, or the directory is missing or not writable.
    pub fn bind(path: &Path, stale: StaleFile, mode: SocketMode) -> Result<Self, ListenError> {
        if stale == StaleFile::Remove || (stale == StaleFile::RemoveDead && is_dead(path)) {
            remove_stale(path);
        }
        let bind = || -> io::Result<Self> {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode.bits()))?;
            socket.bind(&SockAddr::unix(path)?)?;
            let file = SocketFile::of(path)?;
            set_mode(path, mode)?;
            socket.listen(BACKLOG)?;
            socket.set_nonblocking(true)?;
            let listener = socket.into();
            Ok(Self { file, listener })
        };
        bind().map_err(|cause| ListenError::unix(path, cause))
    }

    /// Serves the socket in the caller's tokio runtime.
    ///
    /// # Errors
    /// The runtime cannot register the socket.
    pub fn listen(self) -> io::Result<UnixListening> {
        let listener = UnixListener::from_std(self.listener)?;
        Ok(UnixListening {
            file: self.file,
            listener,
        })
    }
}

impl UnixListening {
    /// Binds and listens at `path`, for the process's user and group. Needs a tokio runtime.
    ///
    /// # Errors
    /// As [`UnixBound::bind`].
    pub fn bind(path: &Path, stale: StaleFile) -> Result<Self, ListenError> {
        let bound = UnixBound::bind(path, stale, SocketMode::Group)?;
        bound
            .listen()
            .map_err(|cause| ListenError::unix(path, cause))
    }

    /// Serves a socket that a service manager opened, whose file stays. Needs a tokio runtime.
    ///
    /// # Errors
    /// The runtime cannot register the socket.
    pub fn inherited(socket: StdListener, path: PathBuf) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            file: SocketFile { path, own: None },
            listener: UnixListener::from_std(socket)?,
        })
    }

    /// Waits for a connection. Cancelling loses no connection.
    ///
    /// # Errors
    /// The error of accept(2).
    pub async fn accept(&self) -> io::Result<UnixStream> {
        self.listener
            .accept()
            .await
            .map(|(stream, _unnamed)| stream)
    }
}

/// Sets the mode of a socket's file, since bind leaves out the bits of the umask. Only the checked file is changed: a user
/// who may write to the directory may have put a symlink in its place, which chmod(2) would follow.
fn set_mode(path: &Path, mode: SocketMode) -> io::Result<()> {
    let mut by_place = fs::OpenOptions::new();
    by_place
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_NOFOLLOW);
    let file = by_place.open(path)?;
    let found = file.metadata()?;
    if !found.file_type().is_socket() {
        let taken = "another file has taken the place of the socket";
        return Err(io::Error::new(io::ErrorKind::AddrInUse, taken));
    }
    if found.mode() & 0o7777 == mode.bits() {
        return Ok(());
    }
    // No call changes the mode through an `O_PATH` descriptor. The descriptor's name in /proc leads to no other file.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let set = fs::set_permissions(name, fs::Permissions::from_mode(mode.bits()));
    let why = "its mode cannot be set without /proc";
    set.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(io::ErrorKind::Unsupported, why),
        _ => error,
    })
}

/// Removes its file when dropped, unless another file has taken the name.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode; `None`: the file belongs to a service manager.
    own: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            own: Some((metadata.dev(), metadata.ino())),
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_own = |now: fs::Metadata| self.own == Some((now.dev(), now.ino()));
        if fs::symlink_metadata(&self.path).is_ok_and(is_own)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(%error, path = %self.path.display(), "cannot remove the socket file");
        }
    }
}

/// Whether no process listens on the socket file. False if that cannot be found out: then the file is left alone.
fn is_dead(path: &Path) -> bool {
    let refused = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        // With a full backlog a blocking call would wait.
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    };
    refused().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Only sockets are removed: a path given by mistake costs no data. Failure is logged; binding then reports the error.
fn remove_stale(path: &Path) {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => fs::remove_file(path),
        Ok(_other) => Err(io::Error::other("it is no socket")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        tracing::warn!(%error, path = %path.display(), "cannot remove the file in the socket's place");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[tokio::test]
    async fn mode_is_0770_and_the_file_goes_away_on_close() {
        let directory = directory();
        let path = directory.path().join("s");
        let listening = UnixListening::bind(&path, StaleFile::Keep).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o770);
        let (connected, accepted) = tokio::join!(UnixStream::connect(&path), listening.accept());
        connected.unwrap();
        accepted.unwrap();
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_of_a_dead_process_is_replaced_and_that_of_a_running_one_is_not() {
        let directory = directory();
        let path = directory.path().join("s");
        let bind = || UnixBound::bind(&path, StaleFile::RemoveDead, SocketMode::Owner);
        let running = StdListener::bind(&path).unwrap();
        // Nobody accepts: the backlog may be full.
        let refused = bind().unwrap_err();
        assert_eq!(refused.cause().kind(), io::ErrorKind::AddrInUse);
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(running);
        assert!(path.exists());
        let bound = bind().unwrap();
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(bound);
        fs::write(&path, "precious").unwrap();
        assert!(bind().is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_mode_is_set_on_a_socket_and_never_on_its_replacement() {
        let directory = directory();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        let precious = directory.path().join("precious");
        fs::write(&precious, "data").unwrap();
        fs::set_permissions(&precious, fs::Permissions::from_mode(0o400)).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        for path in [&precious, &link] {
            let error = set_mode(path, SocketMode::Group).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        }
        assert_eq!(mode(&precious), 0o400);
        let path = directory.path().join("s");
        let _bound = StdListener::bind(&path).unwrap();
        for wanted in [SocketMode::Owner, SocketMode::Group] {
            set_mode(&path, wanted).unwrap();
            assert_eq!(mode(&path), wanted.bits());
        }
    }

    #[tokio::test]
    async fn stale_socket_is_removed_only_if_allowed() {
        let directory = directory();
        let path = directory.path().join("s");
        drop(StdListener::bind(&path).unwrap());
        let error = UnixListening::bind(&path, StaleFile::Keep).unwrap_err();
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
        assert_eq!(error.cause().kind(), io::ErrorKind::AddrInUse);
        UnixListening::bind(&path, StaleFile::Remove).unwrap();
    }

    /// Upstream (configuration): A file that is no socket survives at the path of a unix socket.
    #[tokio::test]
    async fn file_that_is_no_socket_survives_and_listening_fails() {
        let directory = directory();
        let path = directory.path().join("precious");
        fs::write(&path, "data").unwrap();
        let error = UnixListening::bind(&path, StaleFile::Remove).unwrap_err();
        assert_eq!(error.cause().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read_to_string(&path).unwrap(), "data");
    }

    #[tokio::test]
    async fn file_of_a_successor_is_kept() {
        let directory = directory();
        let path = directory.path().join("s");
        let old = UnixListening::bind(&path, StaleFile::Keep).unwrap();
        let new = UnixListening::bind(&path, StaleFile::Remove).unwrap();
        drop(old);
        let (connected, accepted) = tokio::join!(UnixStream::connect(&path), new.accept());
        assert!(connected.is_ok() && accepted.is_ok());
    }

    #[tokio::test]
    async fn name_that_is_too_long_is_an_error_naming_it() {
        let path = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        let error = UnixListening::bind(&path, StaleFile::Keep).unwrap_err();
        assert!(error.to_string().contains("xxx"), "{error}");
    }
}
