//! Users of proxy frontends that listen in clear text.

use std::path::Path;

use adit_proxy::users::{Users, UsersError};

use crate::followed::{Content, FileError, Followed};
use adit_telemetry::AditMetrics;
use adit_tls::reread::Reread;

/// The users in force. Clones share them.
#[derive(Clone, Debug)]
pub struct FrontendUsers(Followed<Users>);

impl Content for Users {
    type Error = UsersError;
    const FLAG: &'static str = "--frontend-users";
    const NAME: &'static str = "list of users";
    const IF_TOO_LONG: &'static str = "name fewer users";

    fn parse(text: &str) -> Result<Self, UsersError> {
        Self::parse(text)
    }
}

impl FrontendUsers {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, names nobody, or a line of it is wrong.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        Followed::load(path).map(Self)
    }

    /// Follows changes of the file. Never ends.
    pub async fn follow(self, metrics: AditMetrics, reread: Reread) {
        self.0.follow(&metrics.users_reloads, &reread, || ()).await;
    }

    pub(super) fn permit(&self, name: &[u8], password: &[u8]) -> bool {
        self.0.content().permit(name, password)
    }

    pub(super) fn permit_basic(&self, header: Option<&http::HeaderValue>) -> bool {
        self.0.content().permit_basic(header)
    }
}
