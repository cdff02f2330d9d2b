//! Paths of the admin socket: where a server or agent opens it, and where commands look for it.

use std::path::{Path, PathBuf};

use super::parts::check_socket_path;
use crate::error::{ConfigError, bail};
use crate::limits;

/// The flag, as errors name it.
const FLAG: &str = "--admin-socket";
/// The flag's environment variable, for commands that take no other flag from the environment.
const VARIABLE: &str = "ADIT_ADMIN_SOCKET";
/// The flag's value for no socket. A file of this name is `./off`.
const OFF: &str = "off";
/// Folder of the default sockets on hosts and in containers. Root can make it; a unit or a volume makes it for other users.
const FOLDER: &str = "/run/adit";
/// The folder of a user's session, for users who cannot write below `/run`.
const USER_FOLDER: &str = "XDG_RUNTIME_DIR";

/// The kind of process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// A proxy server.
    Server,
    /// An agent.
    Agent,
    /// A proxy beside a component.
    Proxy,
}

impl Program {
    /// The name of its default socket: a server and an agent on one host have two.
    fn file(self) -> &'static str {
        match self {
            Self::Server => "server.sock",
            Self::Agent => "agent.sock",
            Self::Proxy => "proxy.sock",
        }
    }

    /// The default sockets of this kind of process, best first.
    fn places(self, env: &dyn Fn(&str) -> Option<String>) -> Vec<PathBuf> {
        let user = env(USER_FOLDER).map(PathBuf::from);
        let user = user.filter(|folder| folder.is_absolute());
        let folders = [PathBuf::from(FOLDER)]
            .into_iter()
            .chain(user.map(|folder| folder.join("adit")));
        let places = folders.map(|folder| folder.join(self.file()));
        places
            .filter(|path| path.as_os_str().len() <= limits::UNIX_SOCKET_PATH_BYTES_MAX)
            .collect()
    }
}

/// The admin socket that a server or agent opens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AdminSocketPlan {
    /// None.
    Off,
    /// At this path. A start fails if it cannot be opened.
    At(PathBuf),
    /// At the first of these paths that can be opened. Without one a start goes on.
    Default(Vec<PathBuf>),
}

impl AdminSocketPlan {
    /// From the flag; `None`: not given.
    pub(crate) fn of_flag(
        given: Option<PathBuf>,
        program: Program,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Self {
        match given {
            None => Self::Default(program.places(env)),
            Some(path) if path == Path::new(OFF) => Self::Off,
            Some(path) => Self::At(path),
        }
    }

    /// Whether there may be a socket.
    #[must_use]
    pub fn is_on(&self) -> bool {
        *self != Self::Off
    }

    /// The path that was given.
    pub(super) fn given(&self) -> Option<&Path> {
        match self {
            Self::At(path) => Some(path),
            Self::Off | Self::Default(_) => None,
        }
    }

    /// # Errors
    /// The given path is empty or too long.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        check_socket_path(FLAG, self.given())
    }
}

/// Where a command looks for the admin socket of a running process.
#[derive(clap::Args, Clone, PartialEq, Eq, Default, Debug)]
pub struct AdminSocketChoice {
    /// Admin socket of the server or agent; ADIT_ADMIN_SOCKET has the same meaning [default: that of a server, else of an agent,
    /// with its default socket]
    #[arg(long = "admin-socket", value_name = "PATH")]
    pub given: Option<PathBuf>,
    /// The socket that was given, or the default sockets in the order of the search: servers first.
    #[arg(skip)]
    pub places: Vec<PathBuf>,
}

impl AdminSocketChoice {
    /// Finds the places: from the flag, else from the environment, else the default sockets.
    ///
    /// # Errors
    /// The given value names no socket.
    pub(crate) fn find(&mut self, env: &dyn Fn(&str) -> Option<String>) -> Result<(), ConfigError> {
        let given = self.given.clone();
        let variable = || {
            let path = env(VARIABLE).filter(|path| !path.is_empty())?;
            Some((VARIABLE, PathBuf::from(path)))
        };
        let Some((name, path)) = given.map(|path| (FLAG, path)).or_else(variable) else {
            let programs = [Program::Server, Program::Agent, Program::Proxy].into_iter();
            self.places = programs.flat_map(|program| program.places(env)).collect();
            return Ok(());
        };
        if path == Path::new(OFF) {
            bail!("{name} {OFF}: this command asks a running process: give the path of its socket");
        }
        check_socket_path(name, Some(&path))?;
        self.places = vec![path];
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(name: &str) -> Option<String> {
        (name == USER_FOLDER).then(|| "/run/user/7".to_owned())
    }

    fn paths(paths: &[&str]) -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).collect()
    }

    fn looked(
        given: Option<&str>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Vec<PathBuf>, ConfigError> {
        let mut choice = AdminSocketChoice {
            given: given.map(Into::into),
            ..AdminSocketChoice::default()
        };
        choice.find(env).map(|()| choice.places)
    }

    #[test]
    fn commands_look_where_servers_and_agents_listen_by_default() {
        let at = |program| match AdminSocketPlan::of_flag(None, program, &user) {
            AdminSocketPlan::Default(places) => places,
            other => panic!("{other:?}"),
        };
        let server = paths(&["/run/adit/server.sock", "/run/user/7/adit/server.sock"]);
        let agent = paths(&["/run/adit/agent.sock", "/run/user/7/adit/agent.sock"]);
        assert_eq!(at(Program::Server), server);
        assert_eq!(at(Program::Agent), agent);
        let proxy = paths(&["/run/adit/proxy.sock", "/run/user/7/adit/proxy.sock"]);
        assert_eq!(at(Program::Proxy), proxy);
        assert_eq!(
            looked(None, &user).unwrap(),
            [server, agent, proxy].concat()
        );
    }

    #[test]
    fn a_session_folder_that_is_no_absolute_path_or_too_long_is_not_used() {
        for folder in ["", "run", &format!("/{}", "x".repeat(100))] {
            let env = |name: &str| (name == USER_FOLDER).then(|| folder.to_owned());
            let places = looked(None, &env).unwrap();
            let expected =
                ["server", "agent", "proxy"].map(|name| format!("/run/adit/{name}.sock"));
            let expected: Vec<PathBuf> = expected.map(PathBuf::from).into();
            assert_eq!(places, expected, "{folder}");
        }
    }

    #[test]
    fn the_flag_wins_over_the_variable_which_wins_over_the_default() {
        let env = |name: &str| (name == VARIABLE).then(|| "/v".to_owned());
        assert_eq!(looked(Some("/f"), &env).unwrap(), paths(&["/f"]));
        assert_eq!(looked(None, &env).unwrap(), paths(&["/v"]));
        let empty = |name: &str| (name == VARIABLE).then(String::new);
        assert_eq!(looked(None, &empty).unwrap().len(), 3);
        let off = |name: &str| (name == VARIABLE).then(|| OFF.to_owned());
        for (given, env, flag) in [
            (Some(OFF), &empty as &dyn Fn(&str) -> _, FLAG),
            (None, &off, VARIABLE),
        ] {
            let error = looked(given, env).unwrap_err();
            let expected = format!("{flag} off: this command");
            assert!(error.message().starts_with(&expected), "{error}");
        }
        let error = looked(Some(""), &env).unwrap_err();
        assert!(error.message().contains("1 to 107 bytes"), "{error}");
    }
}
