"""The paper's tables and figures, one module each; `registry.PIECES` names them."""
