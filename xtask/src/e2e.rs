//! `cargo xtask e2e`: our server as the egress of a real API server, and the Helm chart in it.

use crate::steps::Outcome;
use crate::workspace::Workspace;
use crate::{script, test};

/// Builds the control plane, renders the chart, and runs the tests with them.
///
/// # Errors
/// When something does not build or cannot be fetched, or a test fails.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<Outcome> {
    let programs = workspace.target().join("e2e");
    if let skipped @ Outcome::Skipped(_) =
        script::outcome(script::command(workspace, "e2e").arg(&programs))?
    {
        return Ok(skipped);
    }
    test::end_to_end(workspace, &programs)?;
    Ok(Outcome::Done)
}
