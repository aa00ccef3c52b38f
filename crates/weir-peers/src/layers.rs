//! Where a request's time goes: `weir explain` of a disk under load, which reads the meters of its layers.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Failure, Outcome};

/// The layers of one subject under one load.
#[derive(Clone, Debug, Serialize)]
pub struct LayerTimes {
    /// The load.
    pub cell: String,
    /// The subject.
    pub subject: String,
    /// From the top.
    pub layers: Vec<LayerTime>,
}

/// One layer's part of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerTime {
    /// The layer.
    pub layer: String,
    /// Mean latency of its requests, in microseconds.
    pub mean_us: f64,
    /// Of that, the microseconds that a request spends here and not below.
    pub own_us: Option<f64>,
    /// The same as a share of the latency at the top, 0 to 1.
    pub share: Option<f64>,
    /// Requests that this rests on.
    pub requests: u64,
}

/// The output of `weir explain --output json`, as far as it is used here.
#[derive(Deserialize)]
struct Explanation {
    windows: Vec<LayerTime>,
}

/// Has `weir explain` read the meters of `disk` in a lab twice, with so much time between.
pub fn explain(weir: &Path, lab: &Path, disk: &str, over: Duration) -> Outcome<Vec<LayerTime>> {
    let mut command = Command::new(weir);
    command.args(["--output", "json", "--lab"]).arg(lab).args(["explain", disk, "--over"]);
    let output = command.arg(format!("{} ms", over.as_millis())).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(Failure(format!("weir explain: {}", String::from_utf8_lossy(&output.stderr).trim_end())));
    }
    let explanation: Explanation = serde_json::from_slice(&output.stdout)?;
    Ok(explanation.windows)
}
