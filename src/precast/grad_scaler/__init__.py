"""What loss scaling is made of; `precast.grad_scaler.scaler` puts it together, so start reading there.

Data flows one way: gradients -> verdict -> step or no step -> event -> ledger -> judgement -> scale.
"""
