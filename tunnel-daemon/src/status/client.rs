//! A client of a process's admin socket.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use adit_config::plan::AdminSocketChoice;

use super::answer::TUNNELS_MAX;
use super::model::{API, Tunnels};
use super::text::clean;

/// Time limit of each read and write: the process answers in milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer that is read: three times the size of [`TUNNELS_MAX`] tunnels.
pub(super) const ANSWER_BYTES_MAX: u64 = 32 << 20;

/// Characters shown of an unexpected answer, which may come from any process.
const SHOWN_MAX: usize = 200;

/// The admin socket of a process.
#[derive(Clone, Debug)]
pub struct Socket {
    path: PathBuf,
}

/// Why there is no answer. Each text names the socket and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// No default socket is that of a running process.
    #[error("no server or agent listens at {}: start one, or give the socket that its log names (admin_socket) by --admin-socket or ADIT_ADMIN_SOCKET", listed(.0))]
    Nowhere(Vec<PathBuf>),
    /// The path does not exist.
    #[error("{}: there is no such socket; start the server or agent with --admin-socket, or name its path here with --admin-socket", .0.display())]
    NoSocket(PathBuf),
    /// No process listens on the socket file.
    #[error("{}: no process listens on this admin socket; start the server or agent, or give its --admin-socket path", .0.display())]
    NobodyListens(PathBuf),
    /// The file's mode forbids it, or the process refused this user.
    #[error("{}: not allowed for this user; only the user that runs the process, and root, may ask it", .0.display())]
    Forbidden(PathBuf),
    /// A process listens, but does not answer.
    #[error("{}: no answer within {} s; the process that listens there hangs, or is stopped", .0.display(), PATIENCE.as_secs())]
    Silent(PathBuf),
    /// The listener is not Adit, or another version.
    #[error("{path}: {1}; use the `adit` of the process that listens there", path = .0.display())]
    Other(PathBuf, String),
    /// Anything else.
    #[error("{path}: {1}", path = .0.display())]
    Failed(PathBuf, io::Error),
}

fn listed(places: &[PathBuf]) -> String {
    let places = places.iter().map(|path| path.display().to_string());
    places.collect::<Vec<_>>().join(", ")
}

impl Socket {
    /// The socket that was given, or the first default socket at which a process listens.
    ///
    /// # Errors
    /// No process listens at a default socket, or none that this user may ask.
    pub(crate) fn of(choice: &AdminSocketChoice) -> Result<Self, AskError> {
        if let [given] = &choice.places[..] {
            return Ok(Self::new(given));
        }
        let mut unusable = None;
        for place in &choice.places {
            let socket = Self::new(place);
            match UnixStream::connect(place).map_err(|cause| socket.failed(cause)) {
                Ok(_open) => return Ok(socket),
                Err(AskError::NoSocket(_) | AskError::NobodyListens(_)) => (),
                Err(error) => _ = unusable.get_or_insert(error),
            }
        }
        Err(unusable.unwrap_or_else(|| AskError::Nowhere(choice.places.clone())))
    }

    /// The socket at this path.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// The JSON text of an answer whose version this program knows.
    ///
    /// # Errors
    /// See [`AskError`].
    pub fn text(&self, question: &str) -> Result<String, AskError> {
        self.answer("GET", question)
    }

    /// Makes the process change something, and returns the result.
    ///
    /// # Errors
    /// See [`AskError`].
    pub fn change<T: DeserializeOwned>(&self, question: &str) -> Result<T, AskError> {
        let answer = self.answer("POST", question)?;
        serde_json::from_str(&answer).map_err(|error| self.not_understood(&error))
    }

    fn answer(&self, method: &str, question: &str) -> Result<String, AskError> {
        let answer = self.exchange(method, question)?;
        let body = self.body(&answer)?;
        let version = serde_json::from_str::<Value>(body)
            .ok()
            .and_then(|value| value.get("api")?.as_u64());
        match version {
            Some(version) if version == u64::from(API) => Ok(body.to_owned()),
            Some(version) => Err(self.other(format!(
                "it speaks version {version} of the admin interface, and this program version {API}"
            ))),
            None => Err(self.other("it is no admin socket of adit".to_owned())),
        }
    }

    /// Parses an answer.
    ///
    /// # Errors
    /// See [`AskError`].
    pub fn ask<T: DeserializeOwned>(&self, question: &str) -> Result<T, AskError> {
        let answer = self.text(question)?;
        serde_json::from_str(&answer).map_err(|error| self.not_understood(&error))
    }

    /// The open tunnels: those that moved most bytes, if an answer cannot have all.
    pub(crate) fn tunnels(&self) -> Result<Tunnels, AskError> {
        self.ask(&format!("/v1/tunnels?limit={TUNNELS_MAX}&sort=bytes"))
    }

    fn exchange(&self, method: &str, question: &str) -> Result<Vec<u8>, AskError> {
        let mut stream = UnixStream::connect(&self.path).map_err(|cause| self.failed(cause))?;
        let asked = (|| {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            write!(
                stream,
                "{method} {question} HTTP/1.1\r\nHost: adit\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )?;
            let mut answer = Vec::new();
            stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer)?;
            Ok(answer)
        })();
        match asked {
            // The process closes connections of other users without an answer.
            Ok(answer) if answer.is_empty() => Err(AskError::Forbidden(self.path.clone())),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.failed(error)),
        }
    }

    fn body<'a>(&self, answer: &'a [u8]) -> Result<&'a str, AskError> {
        let unknown = || self.other("it is no admin socket of adit".to_owned());
        let text = std::str::from_utf8(answer).map_err(|_not_text| unknown())?;
        let (head, body) = text.split_once("\r\n\r\n").ok_or_else(unknown)?;
        let status = head.split(' ').nth(1).ok_or_else(unknown)?;
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let known = name.eq_ignore_ascii_case("content-length");
            known.then(|| value.trim().parse::<usize>().ok())?
        });
        match status {
            "200" if length == Some(body.len()) => Ok(body),
            "200" => Err(self.other("its answer was cut off".to_owned())),
            "404" => Err(self.other("it does not know this question".to_owned())),
            _ => {
                let said = clean(body.trim(), SHOWN_MAX);
                Err(self.other(format!("it answered: {said}")))
            }
        }
    }

    fn not_understood(&self, error: &serde_json::Error) -> AskError {
        let why = clean(&error.to_string(), SHOWN_MAX);
        self.other(format!("its answer is not understood: {why}"))
    }

    fn other(&self, what: String) -> AskError {
        AskError::Other(self.path.clone(), what)
    }

    fn failed(&self, cause: io::Error) -> AskError {
        let path = self.path.clone();
        match cause.kind() {
            io::ErrorKind::NotFound => AskError::NoSocket(path),
            io::ErrorKind::ConnectionRefused => AskError::NobodyListens(path),
            io::ErrorKind::PermissionDenied
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => AskError::Forbidden(path),
            // A socket's timeout is one of these errors.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => AskError::Silent(path),
            _ => AskError::Failed(path, cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Role;
    use super::*;
    use std::os::unix::net::UnixListener;

    /// The result for a process that answers `bytes`.
    fn asked(bytes: &'static [u8]) -> Result<String, AskError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let answering = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            stream.write_all(bytes).unwrap();
        });
        let answer = Socket::new(&path).text("/v1/status");
        answering.join().unwrap();
        answer
    }

    #[test]
    fn bad_answers_are_reported_with_their_cause() {
        let ok = asked(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"api\":1}");
        assert_eq!(ok.unwrap(), "{\"api\":1}");
        let other_version = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"api\":2}";
        let cut_off = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"api\":1}";
        let not_found = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        let failed = b"HTTP/1.1 500 No\r\ncontent-length: 8\r\n\r\na\x1b[2J\nb\n";
        for (bytes, part) in [
            (&other_version[..], "version 2"),
            (cut_off, "cut off"),
            (not_found, "does not know"),
            (failed, "it answered: a?[2J?b;"),
            (b"SSH-2.0-x\r\n", "no admin socket"),
            (b"\xff\xfe", "no admin socket"),
            (b"", "only the user that runs the process"),
        ] {
            let error = asked(bytes).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn unparsable_answers_are_shown_without_control_characters() {
        let error = serde_json::from_str::<Role>("\"\\u001b[2J\"").unwrap_err();
        assert!(error.to_string().contains('\x1b'));
        let told = Socket::new(Path::new("/run/s")).not_understood(&error);
        let told = told.to_string();
        assert!(told.contains("?[2J") && !told.contains('\x1b'), "{told:?}");
    }

    #[test]
    fn a_command_finds_the_first_default_socket_at_which_a_process_listens() {
        let dir = tempfile::tempdir().unwrap();
        let places: Vec<PathBuf> = ["none", "dead", "server", "agent"]
            .iter()
            .map(|name| dir.path().join(name))
            .collect();
        let choice = AdminSocketChoice {
            places: places.clone(),
            ..AdminSocketChoice::default()
        };
        let none = Socket::of(&choice).unwrap_err().to_string();
        for path in &places {
            assert!(none.contains(&path.display().to_string()), "{none}");
        }
        drop(UnixListener::bind(&places[1]).unwrap());
        let agent = UnixListener::bind(&places[3]).unwrap();
        assert_eq!(Socket::of(&choice).unwrap().path, places[3]);
        let server = UnixListener::bind(&places[2]).unwrap();
        assert_eq!(Socket::of(&choice).unwrap().path, places[2]);
        drop((server, agent));
        assert!(matches!(Socket::of(&choice), Err(AskError::Nowhere(_))));
    }

    #[test]
    fn a_missing_socket_error_names_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let error = Socket::new(&path).text("/v1/status").unwrap_err();
        assert!(matches!(error, AskError::NoSocket(_)), "{error}");
        assert!(error.to_string().contains("--admin-socket"));
        drop(UnixListener::bind(&path).unwrap());
        let error = Socket::new(&path).text("/v1/status").unwrap_err();
        assert!(matches!(error, AskError::NobodyListens(_)), "{error}");
    }

    #[test]
    fn a_silent_process_is_reported_as_hanging() {
        let (mut silent, _open) = UnixStream::pair().unwrap();
        let short = Some(Duration::from_millis(1));
        silent.set_read_timeout(short).unwrap();
        let timeout = silent.read(&mut [0]).unwrap_err();
        let error = Socket::new(Path::new("/run/s")).failed(timeout);
        let text =
            "/run/s: no answer within 10 s; the process that listens there hangs, or is stopped";
        assert_eq!(error.to_string(), text);
    }
}
